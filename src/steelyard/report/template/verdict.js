// Ship, look, or do not ship: the measures with their limits, and the blocks that cost most.

const MEASURED = {
  kl: ["KL divergence", small],
  p99: ["KL divergence, 99th percentile", small],
  perplexity: ["Perplexity change", (n) => `${n > 0 ? "+" : ""}${(100 * n).toFixed(1)} %`],
  top1: ["Same next token", (n) => `${(100 * n).toFixed(1)} %`],
};
const WORD_CLASSES = { ship: "ship", look: "look", "do not ship": "stop", "": "open" };

function verdictTable(found) {
  const row = (measure) => {
    const [label, text] = MEASURED[measure.name] ?? [measure.name, small];
    const shown = (n) => (n === null ? "unbounded" : text(n));
    const [upTo, from] = measure.name === "top1" ? ["from", "below"] : ["up to", "above"];
    return el(
      "tr",
      {},
      el("th", { scope: "row" }, label),
      el("td", {}, shown(measure.value)),
      el("td", {}, `${shown(measure.low)} … ${shown(measure.high)}`),
      el("td", {}, `${upTo} ${text(measure.ship)}`),
      el("td", {}, `${from} ${text(measure.stop)}`),
      el(
        "td",
        { class: "word" },
        el(
          "span",
          { class: `word-of ${WORD_CLASSES[measure.word]}` },
          measure.word || "too few tokens",
        ),
      ),
    );
  };
  const heads = ["Measure", "Value", "Interval", "Ship", "Do not ship", "Says"];
  return el(
    "div",
    { class: "scroll", tabindex: 0, role: "region", "aria-label": "Measures of the verdict" },
    el(
      "table",
      { class: "measures" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          heads.map((h) => el("th", { scope: "col" }, h)),
        ),
      ),
      el("tbody", {}, found.measures.map(row)),
    ),
  );
}

function verdict(found) {
  section(
    "verdict",
    "Verdict",
    el(
      "div",
      { class: `verdict ${WORD_CLASSES[found.word]}` },
      el("p", { class: "answer" }, found.word[0].toUpperCase() + found.word.slice(1)),
      el(
        "ul",
        {},
        found.reasons.map((reason) => el("li", {}, reason)),
      ),
    ),
    verdictTable(found),
  );
}

function blocks(all, recipe) {
  const gained = all.filter((b) => b.gain !== null);
  const rest = all
    .filter((b) => b.gain === null)
    .toSorted((a, b) => (b.error ?? 0) - (a.error ?? 0));
  const ranked = gained.length ? [...gained.toSorted((a, b) => b.gain - a.gain), ...rest] : rest;
  const first = gained.length ? Math.min(3, gained.length) : 3;
  const most = Math.max(1e-12, ...gained.map((b) => b.gain));
  const row = (block) => {
    const filled = el("span", { class: "fill" });
    if (block.gain !== null) filled.style.width = `${Math.max(0, (100 * block.gain) / most)}%`;
    return el(
      "tr",
      {},
      el("th", { scope: "row", class: "name" }, block.name),
      el("td", {}, block.error ? (-10 * Math.log10(block.error)).toFixed(1) : NONE),
      gained.length
        ? el(
            "td",
            {},
            block.gain === null
              ? NONE
              : el(
                  "span",
                  { class: "bar-cell" },
                  el(
                    "span",
                    {},
                    small(block.gain),
                    block.gain_error === null
                      ? null
                      : el("span", { class: "hint" }, ` ± ${small(block.gain_error)}`),
                  ),
                  el("span", { class: "track" }, filled),
                ),
          )
        : null,
      el(
        "td",
        { class: "word" },
        [block.schemes, block.larger]
          .filter((s) => s.length)
          .map((s) => s.join(", "))
          .join(" → ") || NONE,
      ),
    );
  };
  const table = (rows) =>
    el(
      "table",
      { class: "blocks" },
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          el("th", { scope: "col" }, "Block"),
          el("th", { scope: "col" }, "Output SNR, dB"),
          gained.length ? el("th", { scope: "col", class: "barred" }, "KL less") : null,
          el("th", { scope: "col", class: "word" }, gained.length ? "With" : "Scheme"),
        ),
      ),
      el("tbody", {}, rows.map(row)),
    );
  const scrolled = (label, rows) =>
    el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table(rows));
  const others = ranked.slice(first);
  section(
    "blocks",
    gained.length ? "Blocks that cost most" : "Blocks with the largest output errors",
    el(
      "p",
      { class: "hint" },
      gained.length
        ? "KL divergence that the model would lose if this block alone had the next larger scheme, measured on held-out text."
        : "Error of the block's output as stored, relative to what the unquantized block adds to its input, on the first batch of the calibration data. steelyard evaluate measures what larger schemes would gain.",
    ),
    scrolled("Blocks, as a table", ranked.slice(0, first)),
    others.length
      ? el(
          "details",
          { class: "reason" },
          el("summary", {}, `The other ${count(others.length)} blocks`),
          scrolled("The other blocks", others),
        )
      : null,
    recipe
      ? el(
          "details",
          { class: "reason", open: true },
          el("summary", {}, "The recipe that gives these three the larger scheme"),
          el("pre", { tabindex: 0 }, recipe),
        )
      : null,
  );
}
