// The page from top to bottom: only the sections that the report has.

function left(all) {
  const reasons = new Map();
  for (const one of all) place(reasons, one.reason, one);
  section(
    "left",
    "Not quantized",
    [...reasons].map(([reason, some]) => {
      const size = some.reduce((sum, one) => sum + one.bytes, 0);
      const rows = () =>
        el(
          "ul",
          {},
          some
            .slice(0, 500)
            .map((one) =>
              el(
                "li",
                {},
                el("span", { class: "name" }, one.name),
                el("span", { class: "hint" }, `${shape(one.shape)} · ${bytes(one.bytes)}`),
              ),
            ),
          some.length > 500
            ? el("li", { class: "hint" }, `and ${count(some.length - 500)} more, in report.json`)
            : null,
        );
      return el(
        "details",
        {
          open: some.length <= 6,
          class: "reason",
          ontoggle: (event) => {
            if (event.target.open && event.target.children.length === 1)
              event.target.append(rows());
          },
        },
        el(
          "summary",
          {},
          el("span", { class: "name" }, reason),
          el(
            "span",
            { class: "hint" },
            ` ${count(some.length)} ${some.length === 1 ? "weight" : "weights"}, ${bytes(size)}`,
          ),
        ),
      );
    }),
  );
}

function theme() {
  const button = document.getElementById("theme"),
    root = document.documentElement;
  const modes = ["system", "light", "dark"];
  const apply = (mode) => {
    if (mode === "system") delete root.dataset.theme;
    else root.dataset.theme = mode;
    button.textContent = `Theme: ${mode}`;
    button.dataset.mode = mode;
    try {
      localStorage.setItem("steelyard-theme", mode);
    } catch {
      /* pages opened from files may have no storage */
    }
  };
  let saved = null;
  try {
    saved = localStorage.getItem("steelyard-theme");
  } catch {
    /* likewise */
  }
  apply(modes.includes(saved) ? saved : "system");
  button.addEventListener("click", () =>
    apply(modes[(modes.indexOf(button.dataset.mode) + 1) % modes.length]),
  );
}

function main() {
  theme();
  const s = report.summary,
    { modules } = report;
  document.getElementById("title").textContent = report.title ?? (s ? s.model : "Comparison");
  document.getElementById("subtitle").textContent = s
    ? `${[...new Set(s.schemes.map((use) => use.label))].join(", ")} · ${s.created.replace("T", " ").replace("+00:00", " UTC")}`
    : "";
  if (report.verdict) verdict(report.verdict);
  if (s && !report.verdict) summary(s);
  if (report.blocks.length) blocks(report.blocks, report.better_recipe);
  if (s && report.verdict) summary(s);
  if (report.evaluation) evaluation(report.evaluation);
  if (report.tokens) tokenFigures(report.tokens);
  if (report.comparison && report.comparison.length)
    section("comparison", "Comparison", comparison(report.comparison));
  if (report.checkpoints.length) checkpoints(report.checkpoints);
  if (modules.length) {
    const dialog = moduleDialog();
    const table = moduleTable(modules, dialog);
    const open = (some) => {
      if (some.length === 1) {
        dialog(some[0], modules);
        return;
      }
      table.only(some);
      document.getElementById("modules").scrollIntoView();
      table.top();
    };
    const maps = [errorMap(modules, open)];
    const measures = measuresIn(modules);
    if (measures.length) {
      const chosen = measures[0][0];
      section(
        "map",
        "By layer and kind",
        choice("Measure", measures, chosen, (key) => maps[0].paint(key)),
        maps[0].parts,
      );
      maps[0].paint(chosen);
      const experts = modules.filter((m) => m.expert !== null && m.depth !== null);
      if (experts.length) {
        const map = expertMap(experts, open),
          some = measuresIn(experts),
          first = some.some(([key]) => key === "tokens") ? "tokens" : some[0][0];
        section(
          "experts",
          "Experts",
          choice("Measure of experts", some, first, map.paint),
          map.parts,
        );
        map.paint(first);
      }
    }
    if (modules.some((m) => m.scale && m.scale.max > 0))
      section("scales", "Scales", scaleChart(modules));
    section("modules", "Modules", table.parts);
    table.update();
  }
  if (report.left.length) left(report.left);
  if (report.notes.length)
    section(
      "notes",
      "Notes",
      el(
        "ul",
        { class: "notes" },
        report.notes.map((note) => el("li", {}, note)),
      ),
    );
  if (report.recipe) section("recipe", "Recipe", el("pre", { tabindex: 0 }, report.recipe));
  document
    .getElementById("footer")
    .append(
      el(
        "p",
        {},
        [
          ...(s ? Object.entries(s.versions).map(([name, version]) => `${name} ${version}`) : []),
          `report schema ${report.schema_version}`,
        ].join(" · "),
      ),
    );
  document.documentElement.dataset.ready = performance.now().toFixed(1);
}

main();
