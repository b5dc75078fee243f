// One module in a dialog: all its figures, and its weights and scales as histograms.

const GPTQ_WORDS = {
  loss: "Loss",
  nearest_loss: "Loss of rounding to nearest",
  dampening_frac: "Dampening",
  dead_columns: "Dead columns",
  nearest_rows: "Rows rounded to nearest",
  fallback: "Fallback",
};

const facts = (rows) =>
  el(
    "dl",
    { class: "facts" },
    rows
      .filter(Boolean)
      .map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))),
  );

function moduleDialog() {
  const dialog = document.getElementById("module");
  let logarithmic = false;
  let list = [];
  let module = null;

  function go(by) {
    const next = list[list.indexOf(module) + by];
    if (next) {
      module = next;
      draw();
    }
  }

  function charts() {
    const { weight, scale } = module;
    return [
      weight
        ? el(
            "section",
            {},
            el("h3", {}, "Weights"),
            el(
              "p",
              { class: "key" },
              el("span", { class: "swatch before" }),
              "before",
              el("span", { class: "swatch after" }),
              "after",
              module.sampled
                ? el("span", { class: "hint" }, ` ${count(module.sampled)} sampled`)
                : null,
            ),
            histogram(
              `Histogram of weights of ${module.name} before and after, from ${small(weight.low)} to ${small(weight.high)}`,
              [
                { counts: weight.after, class: "after" },
                { counts: weight.before, class: "before" },
              ],
              [small(weight.low), small(weight.high)],
              logarithmic,
              -weight.low / (weight.high - weight.low),
            ),
          )
        : null,
      scale
        ? el(
            "section",
            {},
            el("h3", {}, "Scales"),
            el(
              "p",
              { class: "key" },
              `${count(scale.count)} ${scale.count === 1 ? "scale" : "scales"}, logarithmic axis`,
            ),
            histogram(
              `Histogram of scales of ${module.name}, from ${small(scale.min)} to ${small(scale.max)}`,
              [{ counts: scale.counts, class: "after" }],
              [power(scale.low), power((scale.low + scale.high) / 2), power(scale.high)],
              logarithmic,
            ),
          )
        : null,
    ];
  }

  function draw() {
    const m = module,
      at = list.indexOf(m);
    const step = (by, label, sign) =>
      el(
        "button",
        {
          type: "button",
          "aria-label": label,
          disabled: !list[at + by],
          class: "step",
          "data-step": by,
          onclick: () => {
            go(by);
            const same = dialog.querySelector(`[data-step="${by}"]`);
            if (same) same.focus();
          },
        },
        sign,
      );
    const log = el("input", {
      type: "checkbox",
      checked: logarithmic,
      onchange: (event) => {
        logarithmic = event.target.checked;
        pictures.replaceChildren(...charts().filter(Boolean));
      },
    });
    const pictures = el("div", { class: "pictures" }, charts());
    dialog.replaceChildren(
      el(
        "div",
        { class: "inner" },
        el(
          "div",
          { class: "bar" },
          el(
            "div",
            { class: "steps" },
            step(-1, "Previous module", "←"),
            step(1, "Next module", "→"),
            el("span", { class: "hint" }, `${at + 1} of ${count(list.length)}`),
          ),
          el(
            "button",
            {
              type: "button",
              class: "close",
              "aria-label": "Close",
              onclick: () => dialog.close(),
            },
            "Close",
          ),
        ),
        el("h2", { id: "module-name", class: "name", tabindex: -1 }, m.name),
        facts([
          m.output_error === null
            ? null
            : [
                "Output error",
                m.output_snr === null
                  ? "exact"
                  : `${m.output_snr.toFixed(2)} dB, ${band(m.output_snr)}`,
              ],
          ["Weight error", m.snr === null ? decibels(m.snr, m.error) : `${m.snr.toFixed(2)} dB`],
          ["Relative squared error", small(m.error)],
          ["Clipped", share(m.clipped)],
          ["Calibration tokens", m.tokens ? count(m.tokens) : NONE],
        ]),
        m.weight || m.scale ? el("label", { class: "check" }, log, "Logarithmic counts") : null,
        pictures,
        facts([
          ["Shape", shape(m.shape)],
          ["Scheme", m.scheme],
          ["Observer", m.observer ?? NONE],
          m.bytes_after === null
            ? null
            : ["Size", `${bytes(m.bytes_before)} → ${bytes(m.bytes_after)}`],
          m.shape && m.bytes_after
            ? ["Bits per weight", ((8 * m.bytes_after) / (m.shape[0] * m.shape[1])).toFixed(2)]
            : null,
          m.scale
            ? ["Scales, smallest to largest", `${small(m.scale.min)} … ${small(m.scale.max)}`]
            : null,
          m.scale ? ["Median scale", small(m.scale.median)] : null,
          m.scale && m.scale.negative ? ["Negative scales", count(m.scale.negative)] : null,
          ...Object.entries(m.activations).map(([name, [low, high]]) => [
            name,
            low === high ? small(low) : `${small(low)} … ${small(high)}`,
          ]),
          ...Object.entries(m.details)
            .filter(([, value]) => value !== null)
            .map(([name, value]) => [GPTQ_WORDS[name] ?? name, anything(value)]),
        ]),
      ),
    );
  }

  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
  dialog.addEventListener("keydown", (event) => {
    if (event.target.tagName === "INPUT") return;
    if (event.key === "ArrowLeft" || event.key === "ArrowRight") {
      event.preventDefault();
      go(event.key === "ArrowLeft" ? -1 : 1);
      document.getElementById("module-name").focus();
    }
  });
  return (chosen, among) => {
    module = chosen;
    list = among;
    draw();
    if (!dialog.open) dialog.showModal();
    document.getElementById("module-name").focus();
  };
}
