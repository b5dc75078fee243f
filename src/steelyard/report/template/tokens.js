// Single tokens: how their KL divergence is distributed, the worst in their text, continuations.

// White space is part of what a model predicts, so it is made visible.
const visible = (text) => text.replaceAll("\n", "↵") || "∅";

function tokenFigures(found) {
  const total = found.counts.reduce((a, b) => a + b, 0);
  section(
    "tokens",
    "Token by token",
    histogram(
      `KL divergence of ${count(total)} tokens, from ${small(10 ** found.low)} to ${small(10 ** found.high)} nats`,
      [{ counts: found.counts, class: "after" }],
      [
        `≤ ${power(found.low)}`,
        `${power((found.low + found.high) / 2)} nats, logarithmic`,
        power(found.high),
      ],
      false,
    ),
    found.worst.length ? el("h3", {}, "Where they differ most") : null,
    found.worst.length
      ? el(
          "div",
          { class: "scroll", tabindex: 0, role: "region", "aria-label": "Worst tokens" },
          el(
            "table",
            { class: "texts" },
            el(
              "thead",
              {},
              el(
                "tr",
                {},
                ["KL", "Text", "Next", "Original says", "Quantized says"].map((h) =>
                  el("th", { scope: "col" }, h),
                ),
              ),
            ),
            el(
              "tbody",
              {},
              found.worst.map((one) =>
                el(
                  "tr",
                  {},
                  el("td", {}, one.kl_divergence === null ? "infinite" : small(one.kl_divergence)),
                  el("td", { class: "passage" }, el("bdi", {}, visible(one.before))),
                  [one.actual, one.base, one.quantized].map((text) =>
                    el("td", { class: "word" }, el("code", {}, el("bdi", {}, visible(text)))),
                  ),
                ),
              ),
            ),
          ),
        )
      : null,
    found.continuations.length ? el("h3", {}, "Continued by both") : null,
    found.continuations.map((one) =>
      el(
        "article",
        { class: "continued" },
        el("p", { class: "prompt" }, el("bdi", {}, one.prompt)),
        el(
          "div",
          { class: "both" },
          el("div", {}, el("h4", {}, "Original"), el("p", {}, el("bdi", {}, one.base))),
          el("div", {}, el("h4", {}, "Quantized"), el("p", {}, el("bdi", {}, one.quantized))),
        ),
      ),
    ),
  );
}
