// The metrics of an evaluation, if there is one.

function evaluation(found) {
  const rest = { ...found };
  const take = (name) => {
    const value = rest[name];
    delete rest[name];
    return value;
  };
  const before = take("base_perplexity"),
    after = take("perplexity"),
    kl = take("kl_divergence"),
    agreement = take("top1_agreement"),
    tokens = take("tokens"),
    samples = take("samples"),
    seconds = take("seconds"),
    most = take("kl_p99"),
    worst = take("kl_max"),
    error = take("kl_error");
  for (const name of ["loss_error", "top1_error", "kl_p99_low", "kl_p99_high"]) take(name);
  const number = (n, digits) => (typeof n === "number" ? n.toFixed(digits) : anything(n));
  section(
    "evaluation",
    "Evaluation",
    tiles([
      after === undefined
        ? null
        : [
            "Perplexity",
            number(after, 3),
            before === undefined
              ? null
              : `from ${number(before, 3)}${
                  typeof after === "number" && typeof before === "number"
                    ? `, ${after >= before ? "+" : "−"}${Math.abs(100 * (after / before - 1)).toFixed(2)} %`
                    : ""
                }`,
          ],
      after === undefined && before !== undefined ? ["Base perplexity", number(before, 3)] : null,
      kl === undefined
        ? null
        : [
            "KL divergence",
            typeof error === "number" ? `${anything(kl)} ± ${small(error)}` : anything(kl),
            [
              "to the base model, per token",
              most === undefined ? null : `99 % below ${anything(most)}`,
              worst === undefined ? null : `maximum ${anything(worst)}`,
            ]
              .filter(Boolean)
              .join("; "),
          ],
      agreement === undefined
        ? null
        : [
            "Top-1 agreement",
            typeof agreement === "number"
              ? `${(100 * agreement).toFixed(1)} %`
              : anything(agreement),
            "with the base model",
          ],
      tokens === undefined
        ? null
        : [
            "Evaluated on",
            anything(tokens),
            [
              "tokens",
              samples === undefined ? null : `of ${anything(samples)} samples`,
              typeof seconds === "number" ? `in ${duration(seconds)}` : null,
            ]
              .filter(Boolean)
              .join(" "),
          ],
      ...Object.entries(rest).map(([name, value]) => [name, anything(value)]),
    ]),
  );
}
