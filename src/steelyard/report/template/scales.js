// The scales of one kind of module along the layers: from the smallest to the largest, and the median.

function scaleChart(modules) {
  const scaled = modules.filter((m) => m.scale);
  const kinds = [...new Set(scaled.map((m) => m.kind))];
  const lows = scaled.map((m) => m.scale.min).filter((n) => n > 0);
  const low = Math.log10(lows.reduce((a, b) => Math.min(a, b)));
  const high = Math.log10(scaled.reduce((most, m) => Math.max(most, m.scale.max), 0));
  const room = (high - low) * 0.04 || 0.5;
  const height = 200;
  const y = (n) =>
    height * (1 - (Math.log10(Math.max(n, 1e-38)) - low + room) / (high - low + 2 * room));
  const holder = el("div", { class: "plot" });

  function draw(kind) {
    const depths = new Map();
    for (const m of scaled) if (m.kind === kind) place(depths, m.depth ?? -1, m);
    const order = [...depths.keys()].toSorted((a, b) => a - b);
    const width = 600 / order.length;
    const bar = Math.min(width * 0.7, 14);
    const marks = order.map((depth, i) => {
      const all = depths.get(depth).map((m) => m.scale);
      const middle = all.map((s) => s.median).toSorted((a, b) => a - b)[all.length >> 1];
      const least = Math.min(...all.map((s) => s.min)),
        most = Math.max(...all.map((s) => s.max));
      const x = (i + 0.5) * width,
        top = y(most),
        bottom = y(least),
        median = y(middle);
      return svg(
        "g",
        {},
        svg(
          "title",
          {},
          `${depth < 0 ? kind : `layer ${depth}`}: ${small(least)} to ${small(most)}, median ${small(middle)}`,
        ),
        svg("rect", {
          class: "extent",
          x: x - bar / 2,
          y: top,
          width: bar,
          height: Math.max(bottom - top, 1.5),
        }),
        svg("rect", { class: "median", x: x - bar / 2, y: median - 1.5, width: bar, height: 3 }),
      );
    });
    const tens = [];
    for (let p = Math.ceil(low - room); p <= high + room; p += 1) {
      tens.push(svg("line", { class: "rule", x1: 0, x2: 600, y1: y(10 ** p), y2: y(10 ** p) }));
    }
    const first = order[0],
      last = order[order.length - 1];
    holder.replaceChildren(
      el("div", { class: "axis up" }, el("span", {}, power(high)), el("span", {}, power(low))),
      svg(
        "svg",
        {
          viewBox: `0 0 600 ${height}`,
          preserveAspectRatio: "none",
          role: "img",
          "aria-label": `Scales of ${kind} by layer`,
        },
        tens,
        marks,
      ),
      el(
        "div",
        { class: "axis" },
        first < 0
          ? [el("span", {}, "outside the layers")]
          : [
              el("span", {}, `layer ${first}`),
              el("span", {}, order.length > 1 ? `layer ${last}` : ""),
            ],
      ),
    );
  }

  const select = el(
    "select",
    { id: "scale-kind", onchange: () => draw(select.value) },
    kinds.map((kind) => el("option", { value: kind }, kind)),
  );
  draw(kinds[0]);
  return [
    el("div", { class: "controls" }, el("label", { for: "scale-kind" }, "Kind"), select),
    holder,
    el(
      "p",
      { class: "hint" },
      "Each bar spans the scales of a module (of all experts, where there are several); the mark is the median. The axis is logarithmic.",
    ),
  ];
}
