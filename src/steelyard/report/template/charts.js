// Histograms, with their axes as text beside the drawing so that letters keep their size.

function steps(counts, height, tallest, scaled) {
  const width = 600 / counts.length;
  let path = `M0 ${height}`;
  counts.forEach((n, i) => {
    const y = (height - ((height - 4) * scaled(n)) / scaled(tallest)).toFixed(2);
    path += `L${(i * width).toFixed(2)} ${y}L${((i + 1) * width).toFixed(2)} ${y}`;
  });
  return `${path}L600 ${height}`;
}

// zero: its position on the axis, if it is there
function histogram(label, series, ends, logarithmic, zero) {
  const tallest = Math.max(1, ...series.flatMap((s) => s.counts));
  const scaled = logarithmic ? (n) => Math.log1p(n) : (n) => n;
  const height = 160;
  const inside = zero > 0 && zero < 1;
  const mark = inside && zero > 0.15 && zero < 0.85 ? el("span", { class: "zero" }, "0") : null;
  if (mark) mark.style.left = `${100 * zero}%`;
  return el(
    "figure",
    { class: "histogram" },
    svg(
      "svg",
      {
        viewBox: `0 0 600 ${height}`,
        preserveAspectRatio: "none",
        role: "img",
        "aria-label": label,
      },
      inside
        ? svg("line", { class: "rule", x1: 600 * zero, x2: 600 * zero, y1: 0, y2: height })
        : null,
      series.map((s) =>
        svg("path", { class: s.class, d: steps(s.counts, height, tallest, scaled) }),
      ),
    ),
    el(
      "div",
      { class: "axis" },
      ends.map((end) => el("span", {}, end)),
      mark,
    ),
  );
}

const power = (exponent) => small(10 ** exponent);
