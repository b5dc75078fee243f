// Several checkpoints of one model, scored on the same tokens: a chart and a table.

function checkpoints(rows) {
  const tone = { ship: "good", look: "fair", "do not ship": "bad" };
  const percent = (n, sign) =>
    n === null ? NONE : `${sign && n >= 0 ? "+" : ""}${(100 * n).toFixed(1)} %`;
  const titles = [
    "Checkpoint",
    "Verdict",
    "Scheme",
    "Size",
    "Bits",
    "KL divergence",
    "Behind",
    "KL, p99",
    "Perplexity",
    "Same token",
  ];
  const behind = (row, i) => {
    if (i === 0) return "closest";
    return row.within_noise ? "within noise" : `+${small(row.behind)}`;
  };
  const line = (row, i) =>
    el(
      "tr",
      {},
      el(
        "th",
        { scope: "row" },
        el("span", { class: "mark", "data-mark": letter(i) }),
        row.link ? el("a", { href: `./${row.link}` }, row.name) : row.name,
      ),
      el("td", { class: `word ${tone[row.verdict] ?? ""}` }, row.verdict),
      el("td", { class: "word" }, row.schemes),
      el("td", {}, bytes(row.bytes)),
      el("td", {}, row.bits_per_weight === null ? NONE : row.bits_per_weight.toFixed(2)),
      el(
        "td",
        {},
        small(row.kl_divergence),
        row.kl_error === null
          ? ""
          : el("span", { class: "hint" }, ` ± ${Number(row.kl_error.toPrecision(2))}`),
      ),
      el("td", {}, behind(row, i)),
      el("td", {}, small(row.kl_p99)),
      el("td", {}, percent(row.perplexity_change, true)),
      el("td", {}, percent(row.top1_agreement)),
    );
  section(
    "checkpoints",
    "Checkpoints",
    sizeChart(
      rows.map((row) => ({
        name: row.name,
        bytes: row.bytes,
        loss: row.kl_divergence,
        error: row.kl_error,
        word: row.verdict,
        link: row.link,
      })),
    ),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Checkpoints, as a table" },
      el(
        "table",
        {},
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            titles.map((title, i) =>
              el("th", { scope: "col", class: i === 1 || i === 2 ? "word" : null }, title),
            ),
          ),
        ),
        el("tbody", {}, rows.map(line)),
      ),
    ),
  );
}
