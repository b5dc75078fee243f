// Creates elements and formats numbers. Text from the report is only ever set as text.

const report = JSON.parse(document.getElementById("report").textContent);
const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (key === "class") node.setAttribute("class", value);
    else if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value === true ? "" : String(value));
  }
  for (const child of children.flat()) {
    if (child === null || child === undefined) continue;
    node.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
  return node;
}

const el = (tag, attributes, ...children) =>
  fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const NONE = "–";

function bytes(n) {
  if (n === null || n === undefined) return NONE;
  const units = ["B", "kB", "MB", "GB", "TB"];
  let i = 0;
  while (n >= 999.5 && i < units.length - 1) {
    n /= 1000;
    i += 1;
  }
  return `${i === 0 ? n : n.toPrecision(3)} ${units[i]}`;
}

function count(n) {
  return n === null || n === undefined ? NONE : n.toLocaleString("en-US");
}

function decibels(n, error) {
  if (n === null || n === undefined) return error === 0 ? "exact" : NONE;
  return n.toFixed(1);
}

function small(n) {
  if (n === null || n === undefined) return NONE;
  if (n === 0) return "0";
  const size = Math.abs(n);
  return size >= 0.001 && size < 1e5 ? String(Number(n.toPrecision(3))) : n.toExponential(1);
}

function share(n) {
  if (n === null || n === undefined) return NONE;
  if (n === 0) return "0 %";
  return n < 1e-4 ? "<0.01 %" : `${(100 * n).toFixed(2)} %`;
}

function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.round(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.round((seconds % 3600) / 60)} min`;
}

const shape = (sizes) => (sizes ? sizes.join(" × ") : NONE);
const snr = (row) => row.snr ?? (row.error ? -10 * Math.log10(row.error) : null);

function anything(value) {
  if (value === null) return NONE;
  if (typeof value === "number") return Number.isInteger(value) ? count(value) : small(value);
  return typeof value === "string" ? value : JSON.stringify(value);
}

function section(id, title, ...children) {
  const node = el(
    "section",
    { id, "aria-labelledby": `${id}-title` },
    el("h2", { id: `${id}-title` }, title),
    ...children,
  );
  document.getElementById("main").append(node);
  return node;
}

function choice(legend, options, chosen, change) {
  const name = `choice-${legend.replace(/\W+/g, "-")}`;
  return el(
    "fieldset",
    { class: "choice" },
    el("legend", {}, legend),
    options.map(([value, label]) =>
      el(
        "label",
        {},
        el("input", {
          type: "radio",
          name,
          value,
          checked: value === chosen,
          onchange: () => change(value),
        }),
        el("span", {}, label),
      ),
    ),
  );
}

function tiles(rows) {
  return el(
    "dl",
    { class: "tiles" },
    rows
      .filter(Boolean)
      .map(([term, value, more]) =>
        el(
          "div",
          {},
          el("dt", {}, term),
          el("dd", {}, value),
          more ? el("dd", { class: "more" }, more) : null,
        ),
      ),
  );
}
