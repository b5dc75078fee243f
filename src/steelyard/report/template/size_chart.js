// Size against KL divergence, a point for each way to quantize. Below and to the left is better.

const letter = (i) => (i < 26 ? String.fromCharCode(65 + i) : String(i + 1));

// Round numbers from below `low` to above `high`: 1, 2 and 5 times powers of ten, evenly spaced.
function evenTicks(low, high) {
  const rough = (high - low || high || 1) / 4;
  const unit = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * unit).find((n) => n >= rough);
  const first = Math.floor(low / step);
  const found = [];
  for (let i = first; i <= Math.ceil(high / step) || found.length < 2; i += 1) found.push(i * step);
  return found;
}

// The same on a logarithmic axis; only powers of ten where there would be many.
function logTicks(low, high) {
  const some = (digits) => {
    const found = [];
    for (let e = Math.floor(Math.log10(low)); e <= Math.ceil(Math.log10(high)); e += 1)
      for (const digit of digits) found.push(digit * 10 ** e);
    const from = found.findLastIndex((n) => n <= low * 1.0001);
    const to = found.findIndex((n) => n >= high * 0.9999);
    return found.slice(Math.max(from, 0), to < 0 ? undefined : to + 1);
  };
  const all = some([1, 2, 5]);
  const ticks = all.length > 7 ? some([1]) : all;
  return ticks.length > 1 ? ticks : [ticks[0], ticks[0] * 10];
}

// points: {name, bytes, loss, error, word, link}; error is a standard error
function sizeChart(points) {
  const drawn = points
    .map((point, i) => ({ ...point, mark: letter(i) }))
    .filter((p) => Number.isFinite(p.bytes) && typeof p.loss === "number" && p.loss >= 0);
  if (drawn.length < 2) return null;
  const logarithmic = drawn.every((p) => p.loss > 0);
  const losses = drawn.map((p) => p.loss);
  const sizes = drawn.map((p) => p.bytes);
  const xs = evenTicks(Math.min(...sizes), Math.max(...sizes));
  const ys = (logarithmic ? logTicks : evenTicks)(Math.min(...losses), Math.max(...losses));
  const scaled = logarithmic ? Math.log10 : (n) => n;
  const x = (n) => (n - xs[0]) / (xs.at(-1) - xs[0]);
  const y = (n) => {
    const at = (scaled(n) - scaled(ys[0])) / (scaled(ys.at(-1)) - scaled(ys[0]));
    return 1 - Math.min(Math.max(at, 0), 1);
  };
  const moved = (node, across, down) => {
    if (across !== null) node.style.left = `${(100 * across).toFixed(2)}%`;
    if (down !== null) node.style.top = `${(100 * down).toFixed(2)}%`;
    return node;
  };
  const spread = (p) => {
    const least = logarithmic ? ys[0] : 0;
    return [p.loss + 2 * p.error, Math.max(p.loss - 2 * p.error, least)].map(y);
  };
  const front = drawn
    .toSorted((a, b) => a.bytes - b.bytes || a.loss - b.loss)
    .filter((p, i, all) => all.slice(0, i).every((other) => other.loss > p.loss));
  const at = (p) => `${(600 * x(p.bytes)).toFixed(1)} ${(200 * y(p.loss)).toFixed(1)}`;
  const dot = (p) => {
    const about = `${p.name}: ${bytes(p.bytes)}, KL divergence ${small(p.loss)}`;
    const tone = { ship: "good", look: "fair", "do not ship": "bad" }[p.word] ?? "";
    const node = el(
      p.link ? "a" : "span",
      {
        class: `dot ${tone}`,
        href: p.link ? `./${p.link}` : null,
        role: p.link ? null : "img",
        title: about,
        "aria-label": about,
      },
      p.mark,
    );
    return moved(node, x(p.bytes), y(p.loss));
  };
  return el(
    "figure",
    { class: "plot sizes" },
    el("h3", {}, "Size against KL divergence: below and to the left is better"),
    el(
      "div",
      { class: "field" },
      ys.map((n) => moved(el("span", { class: "tick" }, small(n)), null, y(n))),
      svg(
        "svg",
        { viewBox: "0 0 600 200", preserveAspectRatio: "none", "aria-hidden": "true" },
        ys.map((n) =>
          svg("line", { class: "rule", x1: 0, x2: 600, y1: 200 * y(n), y2: 200 * y(n) }),
        ),
        svg("path", { class: "front", d: `M${front.map(at).join("L")}` }),
        drawn
          .filter((p) => p.error)
          .map((p) => {
            const [top, bottom] = spread(p);
            const across = 600 * x(p.bytes);
            return svg("line", {
              class: "spread",
              x1: across,
              x2: across,
              y1: 200 * top,
              y2: 200 * bottom,
            });
          }),
      ),
      drawn.map(dot),
    ),
    el(
      "div",
      { class: "axis across" },
      xs.map((n) => moved(el("span", {}, bytes(n)), x(n), null)),
    ),
    el(
      "figcaption",
      { class: "hint" },
      `KL divergence in nats per token${logarithmic ? ", logarithmic" : ""}; the line joins those that no other beats in both.`,
    ),
  );
}
