// All modules, with search, filters and sorting. Only visible rows are in the document.

// Without output errors, their column is left out.
const hasOutputs = report.modules.some((m) => m.output_error !== null);
const COLUMNS = [
  { key: "name", label: "Module", text: (m) => m.name, order: (m) => m.index },
  {
    key: "shape",
    label: "Shape",
    text: (m) => shape(m.shape),
    order: (m) => (m.shape ? m.shape[0] * m.shape[1] : null),
  },
  { key: "scheme", label: "Scheme", text: (m) => m.scheme, order: (m) => m.scheme },
  {
    key: "output",
    label: "Output, dB",
    text: (m) => decibels(m.output_snr, m.output_error),
    order: (m) => m.output_snr ?? (m.output_error === 0 ? Infinity : null),
  },
  {
    key: "snr",
    label: "Weight SNR, dB",
    text: (m) => decibels(m.snr, m.error),
    order: (m) => m.snr ?? (m.error === 0 ? Infinity : null),
  },
  { key: "error", label: "Rel. error", text: (m) => small(m.error), order: (m) => m.error },
  { key: "clipped", label: "Clipped", text: (m) => share(m.clipped), order: (m) => m.clipped },
  {
    key: "scale",
    label: "Scale",
    text: (m) => (m.scale ? small(m.scale.median) : NONE),
    order: (m) => (m.scale ? m.scale.median : null),
  },
  {
    key: "tokens",
    label: "Tokens",
    text: (m) => (m.tokens ? count(m.tokens) : NONE),
    order: (m) => m.tokens,
  },
  { key: "size", label: "Size", text: (m) => bytes(m.bytes_after), order: (m) => m.bytes_after },
].filter((column) => hasOutputs || column.key !== "output");
const WORST_FIRST = new Set(["name", "snr", "output"]); // rising: the smallest ratio is the worst
const ROW = 36;

function moduleTable(modules, open) {
  modules.forEach((m, i) => {
    m.index = i;
    m.found = m.name.toLowerCase();
  });
  let sort = { column: COLUMNS.find((c) => c.key === "output") ?? COLUMNS[0], down: false };
  let cell = null; // modules of a cell of a map
  let rows = modules;
  let active = 0;

  const status = el("p", { class: "hint", role: "status" });
  const search = el("input", {
    type: "search",
    id: "search",
    placeholder: "Search names",
    autocomplete: "off",
    spellcheck: "false",
    "aria-label": "Search modules by name",
    oninput: () => update(),
  });
  const pick = (id, label, key) => {
    const values = [...new Set(modules.map((m) => m[key]))].filter((v) => v !== null);
    if (values.length < 2) return null;
    return el(
      "select",
      { id, "aria-label": label, onchange: () => update() },
      el("option", { value: "" }, label),
      values.map((v) => el("option", { value: v }, v)),
    );
  };
  const kind = pick("kind", "All kinds", "kind"),
    scheme = pick("scheme", "All schemes", "scheme");
  const chip = el("button", {
    type: "button",
    class: "chip",
    hidden: true,
    onclick: () => {
      cell = null;
      update();
      search.focus();
    },
  });
  const heads = COLUMNS.map((column) =>
    el(
      "div",
      { role: "columnheader", class: `k-${column.key}` },
      el("button", { type: "button", onclick: () => by(column) }, column.label),
    ),
  );
  const space = el("div", { class: "space", role: "presentation" });
  const body = el("div", { class: "body", role: "rowgroup", onscroll: () => draw() }, space);
  const table = el(
    "div",
    {
      class: hasOutputs ? "modules outputs" : "modules",
      role: "grid",
      "aria-label": "Modules",
      "aria-colcount": COLUMNS.length,
    },
    el(
      "div",
      { role: "rowgroup", class: "head" },
      el("div", { role: "row", "aria-rowindex": 1 }, heads),
    ),
    body,
  );

  function by(column) {
    sort = {
      column,
      down: sort.column === column ? !sort.down : !WORST_FIRST.has(column.key),
    };
    update();
  }

  function update() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const inside = cell && new Set(cell);
    rows = modules.filter(
      (m) =>
        words.every((word) => m.found.includes(word)) &&
        (!kind || !kind.value || m.kind === kind.value) &&
        (!scheme || !scheme.value || m.scheme === scheme.value) &&
        (!inside || inside.has(m)),
    );
    const { order } = sort.column,
      way = sort.down ? -1 : 1;
    rows.sort((a, b) => {
      const x = order(a),
        y = order(b);
      if (x === y || (x === null && y === null)) return a.index - b.index;
      if (x === null || y === null) return x === null ? 1 : -1; // unknown values come last
      return (x < y ? -1 : 1) * way;
    });
    heads.forEach((head, i) => {
      const sorted = COLUMNS[i] === sort.column;
      head.setAttribute("aria-sort", sorted ? (sort.down ? "descending" : "ascending") : "none");
    });
    chip.hidden = !cell;
    if (cell) chip.textContent = `${cell.length} modules of one cell ✕`;
    table.setAttribute("aria-rowcount", rows.length + 1);
    status.textContent =
      rows.length === modules.length
        ? `${count(rows.length)} modules`
        : `${count(rows.length)} of ${count(modules.length)} modules`;
    active = 0;
    space.style.height = `${rows.length * ROW}px`;
    body.scrollTop = 0;
    draw();
  }

  function draw() {
    const first = Math.max(0, Math.floor(body.scrollTop / ROW) - 4);
    const last = Math.min(rows.length, Math.ceil((body.scrollTop + body.clientHeight) / ROW) + 4);
    const focused = body.contains(document.activeElement);
    const lines = [];
    for (let i = first; i < last; i += 1) {
      const m = rows[i];
      const line = el(
        "div",
        { role: "row", tabindex: i === active ? 0 : -1, "data-i": i, "aria-rowindex": i + 2 },
        COLUMNS.map((column) =>
          el(
            "div",
            {
              role: "gridcell",
              class: `k-${column.key}${column.key === "name" ? " name" : ""}`,
              title: column.key === "name" ? m.name : null,
            },
            column.key === "name" ? el("bdi", { dir: "ltr" }, m.name) : column.text(m),
          ),
        ),
      );
      line.style.transform = `translateY(${i * ROW}px)`;
      lines.push(line);
    }
    if (!rows.length) lines.push(el("p", { class: "nothing" }, "No module matches."));
    space.replaceChildren(...lines);
    if (focused) {
      const line = space.querySelector(`[data-i="${active}"]`);
      if (line) line.focus({ preventScroll: true });
    }
  }

  function go(i) {
    active = Math.min(rows.length - 1, Math.max(0, i));
    const top = active * ROW,
      height = body.clientHeight;
    if (top < body.scrollTop) body.scrollTop = top;
    if (top + ROW > body.scrollTop + height) body.scrollTop = top + ROW - height;
    draw();
    const line = space.querySelector(`[data-i="${active}"]`);
    if (line) line.focus({ preventScroll: true });
  }

  const page = () => Math.max(1, Math.floor(body.clientHeight / ROW) - 1);
  const KEYS = {
    ArrowDown: () => go(active + 1),
    ArrowUp: () => go(active - 1),
    PageDown: () => go(active + page()),
    PageUp: () => go(active - page()),
    Home: () => go(0),
    End: () => go(rows.length - 1),
    Enter: () => open(rows[active], rows),
    " ": () => open(rows[active], rows),
  };
  body.addEventListener("keydown", (event) => {
    if (!KEYS[event.key] || !rows.length || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    KEYS[event.key]();
  });
  body.addEventListener("click", (event) => {
    const line = event.target.closest("[data-i]");
    if (!line) return;
    go(Number(line.dataset.i));
    open(rows[active], rows);
  });
  search.addEventListener("keydown", (event) => {
    if (event.key === "ArrowDown" && rows.length) {
      event.preventDefault();
      go(0);
    }
  });
  window.addEventListener("resize", () => draw());

  return {
    parts: [el("div", { class: "controls" }, search, kind, scheme, chip, status), table],
    update,
    only(some) {
      cell = some;
      search.value = "";
      for (const s of [kind, scheme]) if (s) s.value = "";
      update();
    },
    top() {
      go(0);
    },
  };
}
