// Several ways to quantize one model: a table, and their layers as lines.

const LINES = 6;

function comparison(rows) {
  const names = [...new Set(rows.flatMap((row) => Object.keys(row.evaluation)))];
  const seconds = rows.some((row) => row.seconds !== null);
  const ratios = rows.map(snr);
  const best = Math.max(...ratios.filter((n) => n !== null), 1e-9);
  const bar = (n) => {
    const fill = el("span", { class: "fill" });
    fill.style.width = `${Math.max(0, 100 * n / best)}%`;
    return el("span", { class: "bar-cell" }, el("span", {}, n.toFixed(1)), el("span", { class: "track" }, fill));
  };
  const table = el("table", {}, el("thead", {}, el("tr", {},
    ["Scheme", "Observer", "Size", "SNR, dB", "Rel. error"].map((h) => el("th", { scope: "col" }, h)),
    seconds ? el("th", { scope: "col" }, "Time") : null, names.map((n) => el("th", { scope: "col" }, EVALUATED[n] ?? n)))),
  el("tbody", {}, rows.map((row, i) => el("tr", {},
    el("th", { scope: "row" }, row.layers.length ? el("span", { class: `line l${i % LINES}` }) : null, row.scheme),
    el("td", { class: "word" }, row.observer ?? NONE), el("td", {}, bytes(row.bytes)),
    el("td", {}, ratios[i] === null ? NONE : bar(ratios[i])), el("td", {}, small(row.error)),
    seconds ? el("td", {}, row.seconds === null ? NONE : duration(row.seconds)) : null,
    names.map((n) => el("td", {}, n in row.evaluation ? anything(row.evaluation[n]) : NONE))))));
  return [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Comparison, as a table" }, table), layerLines(rows)];
}

function layerLines(rows) {
  const drawn = rows.map((row, i) => [i, row.layers.map((e) => (e ? -10 * Math.log10(e) : null))]).filter(([, line]) => line.length > 1);
  if (!drawn.length) return null;
  const all = drawn.flatMap(([, line]) => line).filter((n) => n !== null);
  const low = Math.min(...all), high = Math.max(...all), room = (high - low) * 0.06 || 1;
  const longest = Math.max(...drawn.map(([, line]) => line.length));
  const height = 200;
  const point = (n, i) => `${(600 * i / (longest - 1)).toFixed(1)} ${(height * (1 - (n - low + room) / (high - low + 2 * room))).toFixed(1)}`;
  return el("div", { class: "plot" }, el("h3", {}, "Signal to noise by layer, dB"),
    el("div", { class: "axis up" }, el("span", {}, high.toFixed(1)), el("span", {}, low.toFixed(1))),
    svg("svg", { viewBox: `0 0 600 ${height}`, preserveAspectRatio: "none", role: "img",
      "aria-label": "Signal to noise of each layer, a line for each row of the table" },
    drawn.map(([i, line]) => svg("path", { class: `line l${i % LINES}`,
      d: line.map((n, k) => (n === null ? "" : `${k === 0 || line[k - 1] === null ? "M" : "L"}${point(n, k)}`)).join("") },
    svg("title", {}, `${rows[i].scheme} ${rows[i].observer ?? ""}`)))),
    el("div", { class: "axis" }, el("span", {}, "layer 0"), el("span", {}, `layer ${longest - 1}`)));
}
