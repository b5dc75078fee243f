// Several ways to quantize one model: a table, and their layers as lines.

const LINES = 6;
const EVALUATED = {
  perplexity: "Perplexity",
  base_perplexity: "Base perplexity",
  kl_divergence: "KL",
  top1_agreement: "Top-1",
  tokens: "Tokens",
};

const finite = (values) => values.filter((n) => typeof n === "number" && Number.isFinite(n));

function comparison(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.evaluation)))];
  const has = (key) => rows.some((row) => row[key] !== null);
  const ratios = rows.map(snr);
  const bar = (text, n, most) => {
    const filled = el("span", { class: "fill" });
    filled.style.width = `${Math.max(0, (100 * n) / most)}%`;
    return el(
      "span",
      { class: "bar-cell" },
      el("span", {}, text),
      el("span", { class: "track" }, filled),
    );
  };
  // A bar for the KL divergence if it was measured, else for the error of the weights.
  const losses = finite(rows.map((row) => row.evaluation.kl_divergence));
  const most = Math.max(...(losses.length ? losses : finite(ratios)), 1e-9);
  const measured = (name, n) => {
    if (n === undefined) return NONE;
    if (name === "kl_divergence" && typeof n === "number") return bar(small(n), n, most);
    if (name === "top1_agreement" && typeof n === "number") return `${(100 * n).toFixed(1)} %`;
    return name === "perplexity" && typeof n === "number" ? n.toFixed(2) : anything(n);
  };
  const head = (text, barred) => el("th", { scope: "col", class: barred ? "barred" : null }, text);
  const table = el(
    "table",
    {},
    el(
      "thead",
      {},
      el(
        "tr",
        {},
        head("Scheme"),
        head("Observer"),
        head("Size"),
        has("bits_per_weight") ? head("Bits") : null,
        names.map((n) => head(EVALUATED[n] ?? n, n === "kl_divergence")),
        head("SNR, dB", !losses.length),
        head("Rel. error"),
        has("seconds") ? head("Time") : null,
      ),
    ),
    el(
      "tbody",
      {},
      rows.map((row, i) =>
        el(
          "tr",
          {},
          el(
            "th",
            { scope: "row" },
            losses.length ? el("span", { class: "mark", "data-mark": letter(i) }) : null,
            row.layers.length ? el("span", { class: `line l${i % LINES}` }) : null,
            row.scheme,
          ),
          el("td", { class: "word" }, row.observer ?? NONE),
          el("td", {}, bytes(row.bytes)),
          has("bits_per_weight")
            ? el("td", {}, row.bits_per_weight === null ? NONE : row.bits_per_weight.toFixed(2))
            : null,
          names.map((n) => el("td", {}, measured(n, row.evaluation[n]))),
          el(
            "td",
            {},
            ratios[i] === null
              ? NONE
              : losses.length
                ? ratios[i].toFixed(1)
                : bar(ratios[i].toFixed(1), ratios[i], most),
          ),
          el("td", {}, small(row.error)),
          has("seconds") ? el("td", {}, row.seconds === null ? NONE : duration(row.seconds)) : null,
        ),
      ),
    ),
  );
  return [
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Comparison, as a table" },
      table,
    ),
    losses.length
      ? sizeChart(
          rows.map((row) => ({
            name: [row.scheme, row.observer].filter(Boolean).join(", "),
            bytes: row.bytes,
            loss: row.evaluation.kl_divergence,
          })),
        )
      : null,
    layerLines(rows),
  ];
}

function layerLines(rows) {
  const drawn = rows
    .map((row, i) => [i, row.layers.map((e) => (e ? -10 * Math.log10(e) : null))])
    .filter(([, line]) => line.filter((n) => n !== null).length > 1);
  if (!drawn.length) return null;
  const all = drawn.flatMap(([, line]) => line).filter((n) => n !== null);
  const low = Math.min(...all),
    high = Math.max(...all),
    room = (high - low) * 0.06 || 1;
  const longest = Math.max(...drawn.map(([, line]) => line.length));
  const height = 200;
  const point = (n, i) =>
    `${((600 * i) / (longest - 1)).toFixed(1)} ${(height * (1 - (n - low + room) / (high - low + 2 * room))).toFixed(1)}`;
  return el(
    "div",
    { class: "plot" },
    el("h3", {}, "Signal to noise by layer, dB"),
    el(
      "div",
      { class: "axis up" },
      el("span", {}, high.toFixed(1)),
      el("span", {}, low.toFixed(1)),
    ),
    svg(
      "svg",
      {
        viewBox: `0 0 600 ${height}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": "Signal to noise of each layer, a line for each row of the table",
      },
      drawn.map(([i, line]) =>
        svg(
          "path",
          {
            class: `line l${i % LINES}`,
            d: `M${line
              .map((n, k) => (n === null ? null : point(n, k)))
              .filter(Boolean)
              .join("L")}`,
          },
          svg("title", {}, `${rows[i].scheme} ${rows[i].observer ?? ""}`),
        ),
      ),
    ),
    el("div", { class: "axis" }, el("span", {}, "layer 0"), el("span", {}, `layer ${longest - 1}`)),
  );
}
