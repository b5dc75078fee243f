// The page from top to bottom: only the sections that the report has.

function summary(s) {
  const fewest = report.modules.reduce((least, m) => Math.min(least, m.tokens), Infinity);
  section("summary", "Summary", tiles([
    ["Size", bytes(s.output_bytes), `from ${bytes(s.source_bytes)}, ${(100 * s.output_bytes / s.source_bytes).toFixed(0)} %`],
    s.bits_per_weight === null ? null : ["Bits per weight", s.bits_per_weight.toFixed(2),
      s.bits_per_weight_overall === null ? "over quantized weights" : `${s.bits_per_weight_overall.toFixed(2)} over the whole checkpoint`],
    s.median_snr === null ? null : ["Signal to noise", `${s.median_snr.toFixed(1)} dB`, `median; worst ${s.worst_snr.toFixed(1)} dB`],
    ["Modules", count(s.quantized), `quantized; ${count(s.left)} weights left as they are`],
    s.tokens ? ["Tokens", count(s.tokens), `most seen by a module; fewest ${count(fewest)}`] : null,
    ["Time", duration(s.seconds), s.peak_memory === null ? null : `at most ${bytes(s.peak_memory)} of memory`],
  ]), el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Schemes" }, el("table", { class: "schemes" },
    el("thead", {}, el("tr", {}, ["Scheme", "Modules", "Weights", "Inputs", "Format"].map((h) => el("th", { scope: "col" }, h)))),
    el("tbody", {}, s.schemes.map((use) => el("tr", {}, el("th", { scope: "row" }, use.label), el("td", {}, count(use.modules)),
      el("td", { class: "word" }, use.weights ?? "as they are"), el("td", { class: "word" }, use.inputs ?? "as they are"),
      el("td", { class: "word" }, use.format)))))));
}

function evaluation(found) {
  const rest = { ...found };
  const take = (name) => { const value = rest[name]; delete rest[name]; return value; };
  const before = take("base_perplexity"), after = take("perplexity"), kl = take("kl_divergence"),
    agreement = take("top1_agreement"), tokens = take("tokens"), samples = take("samples"),
    seconds = take("seconds"), most = take("kl_p99"), worst = take("kl_max");
  const number = (n, digits) => (typeof n === "number" ? n.toFixed(digits) : anything(n));
  section("evaluation", "Evaluation", tiles([
    after === undefined ? null : ["Perplexity", number(after, 3), before === undefined ? null : `from ${number(before, 3)}${
      typeof after === "number" && typeof before === "number" ? `, ${after >= before ? "+" : "−"}${Math.abs(100 * (after / before - 1)).toFixed(2)} %` : ""}`],
    after === undefined && before !== undefined ? ["Perplexity before", number(before, 3)] : null,
    kl === undefined ? null : ["KL divergence", anything(kl), ["to the original, per token", most === undefined ? null : `99 % up to ${anything(most)}`,
      worst === undefined ? null : `all up to ${anything(worst)}`].filter(Boolean).join("; ")],
    agreement === undefined ? null : ["Top-1 agreement", typeof agreement === "number" ? `${(100 * agreement).toFixed(1)} %` : anything(agreement), "with the original"],
    tokens === undefined ? null : ["Evaluated on", anything(tokens), ["tokens", samples === undefined ? null : `of ${anything(samples)} samples`,
      typeof seconds === "number" ? `in ${duration(seconds)}` : null].filter(Boolean).join(" ")],
    ...Object.entries(rest).map(([name, value]) => [name, anything(value)]),
  ]));
}

function left(all) {
  const reasons = new Map();
  for (const one of all) place(reasons, one.reason, one);
  section("left", "Left as they are", [...reasons].map(([reason, some]) => {
    const size = some.reduce((sum, one) => sum + one.bytes, 0);
    const rows = () => el("ul", {}, some.slice(0, 500).map((one) => el("li", {}, el("span", { class: "name" }, one.name),
      el("span", { class: "hint" }, `${shape(one.shape)} · ${bytes(one.bytes)}`))),
    some.length > 500 ? el("li", { class: "hint" }, `and ${count(some.length - 500)} more, in report.json`) : null);
    return el("details", { open: some.length <= 6, class: "reason", ontoggle: (event) => {
      if (event.target.open && event.target.children.length === 1) event.target.append(rows()); } },
    el("summary", {}, el("span", { class: "name" }, reason), el("span", { class: "hint" }, ` ${count(some.length)} ${some.length === 1 ? "weight" : "weights"}, ${bytes(size)}`)));
  }));
}

function theme() {
  const button = document.getElementById("theme"), root = document.documentElement;
  const modes = ["system", "light", "dark"];
  const apply = (mode) => {
    if (mode === "system") delete root.dataset.theme; else root.dataset.theme = mode;
    button.textContent = `Theme: ${mode}`;
    button.dataset.mode = mode;
    try { localStorage.setItem("steelyard-theme", mode); } catch { /* not where files have no storage */ }
  };
  let saved = null;
  try { saved = localStorage.getItem("steelyard-theme"); } catch { /* likewise */ }
  apply(modes.includes(saved) ? saved : "system");
  button.addEventListener("click", () => apply(modes[(modes.indexOf(button.dataset.mode) + 1) % modes.length]));
}

function main() {
  theme();
  const s = report.summary, { modules } = report;
  document.getElementById("title").textContent = report.title ?? (s ? s.model : "Comparison");
  document.getElementById("subtitle").textContent = s
    ? `${[...new Set(s.schemes.map((use) => use.label))].join(", ")} · ${s.created.replace("T", " ").replace("+00:00", " UTC")}` : "";
  if (s) summary(s);
  if (report.evaluation) evaluation(report.evaluation);
  if (report.comparison && report.comparison.length) section("comparison", "Comparison", comparison(report.comparison));
  if (modules.length) {
    const dialog = moduleDialog();
    const table = moduleTable(modules, dialog);
    const open = (some) => {
      if (some.length === 1) { dialog(some[0], modules); return; }
      table.only(some);
      document.getElementById("modules").scrollIntoView();
      table.top();
    };
    const maps = [errorMap(modules, open)];
    const measures = measuresIn(modules);
    if (measures.length) {
      const chosen = measures[0][0];
      section("map", "By layer and kind", choice("Measure", measures, chosen, (key) => maps[0].paint(key)), maps[0].parts);
      maps[0].paint(chosen);
      const experts = modules.filter((m) => m.expert !== null && m.depth !== null);
      if (experts.length) {
        const map = expertMap(experts, open), some = measuresIn(experts), first = some.some(([key]) => key === "tokens") ? "tokens" : some[0][0];
        section("experts", "Experts", choice("Measure of experts", some, first, map.paint), map.parts);
        map.paint(first);
      }
    }
    if (modules.some((m) => m.scale && m.scale.max > 0)) section("scales", "Scales", scaleChart(modules));
    section("modules", "Modules", table.parts);
    table.update();
  }
  if (report.left.length) left(report.left);
  if (report.notes.length) section("notes", "Notes", el("ul", { class: "notes" }, report.notes.map((note) => el("li", {}, note))));
  if (report.recipe) section("recipe", "Recipe", el("pre", { tabindex: 0 }, report.recipe));
  document.getElementById("footer").append(el("p", {}, [
    ...(s ? Object.entries(s.versions).map(([name, version]) => `${name} ${version}`) : []), `report schema ${report.schema_version}`].join(" · ")));
  document.documentElement.dataset.ready = performance.now().toFixed(1);
}

main();
