// A heat map with cells to point at, or to move over with the arrow keys.

const LEVELS = 12;

// Signal to noise has fixed colours: 4 dB for each, from 44 dB down, in bands with names.
const BEST = 44,
  EACH = 4;
const BANDS = [
  [40, "negligible"],
  [28, "small"],
  [20, "moderate"],
  [12, "large"],
  [-Infinity, "severe"],
];
const band = (decibel) => BANDS.find(([from]) => decibel >= from)[1];
const levelOf = (n) => Math.min(LEVELS - 1, Math.max(0, Math.ceil((BEST - n) / EACH) - 1));
const ratio = (key) => (modules) => {
  const e = mean(known(modules, key));
  return e ? -10 * Math.log10(e) : null;
};
const inBand = (n) => `${n.toFixed(1)} dB, ${band(n)}`;

const mean = (numbers) =>
  numbers.length ? numbers.reduce((a, b) => a + b, 0) / numbers.length : null;
const known = (modules, key) =>
  modules.map((m) => m[key]).filter((n) => n !== null && n !== undefined);

// value: of the modules of one cell; worse: 1 if more is worse, else -1; scaled: the value that colours are linear in;
// fixed: in decibels, with the same colours in every report
const MEASURES = {
  output_snr: {
    label: "Output error",
    fixed: true,
    worse: -1,
    value: ratio("output_error"),
    text: inBand,
  },
  snr: {
    label: "Weight error",
    fixed: true,
    worse: -1,
    value: ratio("error"),
    text: inBand,
  },
  clipped: {
    label: "Clipped",
    unit: "fraction of weights",
    worse: 1,
    value: (modules) => mean(known(modules, "clipped")),
    text: share,
  },
  tokens: {
    label: "Calibration tokens",
    unit: "tokens",
    worse: -1,
    scaled: Math.log1p,
    value: (modules) => Math.min(...known(modules, "tokens")),
    text: count,
  },
};

// The cell of an event.
const cellOf = (event) => event.target.dataset && event.target.dataset.at;

// rows: [{key, label}], columns: [label], cells: Map of "row/column" to modules
function heatMap({ label, rows, columns, columnName, cells, open }) {
  const readout = el("p", { class: "readout", "aria-live": "polite" });
  const legend = el("div", { class: "legend", "aria-hidden": "true" });
  const grid = el("div", {
    class: "heat",
    role: "grid",
    "aria-label": label,
    "aria-rowcount": rows.length,
    "aria-colcount": columns.length,
  });
  grid.style.gridTemplateColumns = `max-content repeat(${columns.length}, minmax(var(--cell), 1fr))`;
  grid.classList.toggle("few", columns.length < 16);
  const nodes = new Map();
  let current = null;
  let measure = MEASURES.snr;

  const every = Math.max(1, Math.ceil(columns.length / 16));
  rows.forEach((row, r) => {
    const dot = row.label.lastIndexOf(".") + 1;
    const line = el(
      "div",
      { role: "row" },
      el(
        "div",
        { role: "rowheader", class: "name", title: row.label },
        el("span", { class: "path" }, row.label.slice(0, dot)),
        row.label.slice(dot),
      ),
    );
    columns.forEach((_, c) => {
      const there = cells.has(`${r}/${c}`);
      const node = el(
        "div",
        there
          ? { role: "gridcell", tabindex: -1, "data-at": `${r}/${c}` }
          : { role: "gridcell", class: "none", "aria-label": "no module" },
      );
      if (there) nodes.set(`${r}/${c}`, node);
      line.append(node);
    });
    grid.append(line);
  });
  grid.append(
    el(
      "div",
      { class: "columns", "aria-hidden": "true" },
      el("span", {}, columnName),
      columns.map((name, c) => el("span", {}, c % every === 0 || !/^\d/.test(name) ? name : "")),
    ),
  );

  function describe(at) {
    const [r, c] = at.split("/").map(Number);
    const modules = cells.get(at);
    const value = measure.value(modules);
    const what =
      modules.length === 1
        ? modules[0].name
        : `${rows[r].label}, ${columnName} ${columns[c]}: ${modules.length} modules`;
    return `${what}: ${value === null ? NONE : measure.text(value)}`;
  }

  function show(at) {
    readout.textContent = describe(at);
  }

  function go(at, focus) {
    if (current) nodes.get(current).tabIndex = -1;
    current = at;
    const node = nodes.get(at);
    node.tabIndex = 0;
    node.setAttribute("aria-label", describe(at));
    if (focus) node.focus();
  }

  function paint(key) {
    measure = MEASURES[key];
    const values = new Map([...nodes.keys()].map((at) => [at, measure.value(cells.get(at))]));
    const scaled = measure.scaled ?? ((n) => n);
    const all = [...values.values()].filter((n) => n !== null);
    const low = all.reduce((a, b) => Math.min(a, b), Infinity),
      high = all.reduce((a, b) => Math.max(a, b), -Infinity);
    for (const [at, node] of nodes) {
      const value = values.get(at);
      let level = 0;
      if (value !== null && measure.fixed) level = levelOf(value);
      else if (value !== null && high > low) {
        const along = (scaled(value) - scaled(low)) / (scaled(high) - scaled(low));
        const bad = measure.worse > 0 ? along : 1 - along;
        level = Math.min(LEVELS - 1, Math.max(0, Math.floor(bad * LEVELS)));
      }
      node.className = value === null ? "unknown" : `c${level}`;
    }
    readout.textContent = "Point at a cell, or move with the arrow keys; Enter opens it.";
    if (measure.fixed) {
      legend.replaceChildren(...bandLegend());
      return;
    }
    const ends = all.length ? [measure.text(low), measure.text(high)] : [NONE, NONE];
    if (measure.worse < 0) ends.reverse();
    legend.replaceChildren(
      el("span", {}, ends[0]),
      el(
        "span",
        { class: "ramp" },
        Array.from({ length: LEVELS }, (_, i) => el("i", { class: `c${i}` })),
      ),
      el("span", {}, ends[1]),
      el("span", { class: "unit" }, `${measure.unit}, worse to the right`),
    );
  }

  function step(dr, dc) {
    let [r, c] = current.split("/").map(Number);
    do {
      r += dr;
      c += dc;
    } while (r >= 0 && c >= 0 && r < rows.length && c < columns.length && !nodes.has(`${r}/${c}`));
    if (nodes.has(`${r}/${c}`)) go(`${r}/${c}`, true);
  }

  function end(last) {
    const [r] = current.split("/");
    const line = [...nodes.keys()].filter((at) => at.startsWith(`${r}/`));
    go(last ? line[line.length - 1] : line[0], true);
  }

  const KEYS = {
    ArrowUp: () => step(-1, 0),
    ArrowDown: () => step(1, 0),
    ArrowLeft: () => step(0, -1),
    ArrowRight: () => step(0, 1),
    Home: () => end(false),
    End: () => end(true),
    Enter: () => open(cells.get(current)),
    " ": () => open(cells.get(current)),
  };
  grid.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || !current || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  grid.addEventListener("pointerover", (event) => {
    if (cellOf(event)) show(cellOf(event));
  });
  grid.addEventListener("focusin", (event) => {
    if (cellOf(event)) {
      go(cellOf(event), false);
      show(cellOf(event));
    }
  });
  grid.addEventListener("click", (event) => {
    if (cellOf(event)) {
      go(cellOf(event), true);
      open(cells.get(cellOf(event)));
    }
  });
  if (nodes.size) go(nodes.keys().next().value, false);
  return {
    paint,
    parts: [el("div", { class: "scroll" }, grid), el("div", { class: "below" }, readout, legend)],
  };
}

// Each band with its colours and the decibels where it begins.
function bandLegend() {
  let first = 0;
  return BANDS.map(([from, name]) => {
    const last = from === -Infinity ? LEVELS : (BEST - from) / EACH;
    const colours = Array.from({ length: last - first }, (_, i) =>
      el("i", { class: `c${first + i}` }),
    );
    first = last;
    const edge = from === -Infinity ? `below ${BANDS[BANDS.length - 2][0]}` : `from ${from}`;
    return el(
      "span",
      { class: "band" },
      el("span", { class: "ramp" }, colours),
      el("span", {}, `${name}, ${edge} dB`),
    );
  });
}

function measuresIn(modules) {
  return Object.entries(MEASURES)
    .filter(([key]) =>
      modules.some((m) =>
        key === "tokens" ? m.tokens > 0 : m[key] !== null && m[key] !== undefined,
      ),
    )
    .map(([key, measure]) => [key, measure.label]);
}

function place(cells, at, module) {
  if (!cells.has(at)) cells.set(at, []);
  cells.get(at).push(module);
}

// Layers across, kinds downwards; modules outside the layers have a column of their own.
function errorMap(modules, open) {
  const depths = [...new Set(modules.map((m) => m.depth))].toSorted(
    (a, b) => (a ?? Infinity) - (b ?? Infinity),
  );
  const kinds = [...new Set(modules.map((m) => m.kind))];
  const cells = new Map();
  const row = new Map(kinds.map((kind, i) => [kind, i]));
  const column = new Map(depths.map((depth, i) => [depth, i]));
  for (const m of modules) place(cells, `${row.get(m.kind)}/${column.get(m.depth)}`, m);
  return heatMap({
    label: "Modules by kind and layer",
    rows: kinds.map((label) => ({ label })),
    columns: depths.map((d) => (d === null ? "out" : String(d))),
    columnName: "layer",
    cells,
    open,
  });
}

// Experts across, layers downwards.
function expertMap(modules, open) {
  const experts = [...new Set(modules.map((m) => m.expert))].toSorted((a, b) => a - b);
  const depths = [...new Set(modules.map((m) => m.depth))].toSorted((a, b) => a - b);
  const cells = new Map();
  const row = new Map(depths.map((depth, i) => [depth, i]));
  const column = new Map(experts.map((expert, i) => [expert, i]));
  for (const m of modules) place(cells, `${row.get(m.depth)}/${column.get(m.expert)}`, m);
  return heatMap({
    label: "Experts by layer",
    rows: depths.map((d) => ({ label: `layer ${d}` })),
    columns: experts.map(String),
    columnName: "expert",
    cells,
    open,
  });
}
