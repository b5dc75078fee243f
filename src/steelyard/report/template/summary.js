// Size, errors, tokens and time of the run; the schemes that it used.

function summary(s) {
  const fewest = report.modules.reduce((least, m) => Math.min(least, m.tokens), Infinity);
  section(
    "summary",
    "Summary",
    tiles([
      [
        "Size",
        bytes(s.output_bytes),
        `from ${bytes(s.source_bytes)}, ${((100 * s.output_bytes) / s.source_bytes).toFixed(0)} %`,
      ],
      s.bits_per_weight === null
        ? null
        : [
            "Bits per weight",
            s.bits_per_weight.toFixed(2),
            s.bits_per_weight_overall === null
              ? "over quantized weights"
              : `${s.bits_per_weight_overall.toFixed(2)} over the whole checkpoint`,
          ],
      s.median_output_snr === null
        ? null
        : [
            "Output error",
            `${s.median_output_snr.toFixed(1)} dB, ${band(s.median_output_snr)}`,
            `median; worst ${s.worst_output_snr.toFixed(1)} dB in ${s.worst_output_module}; on ${s.outputs_on} data`,
          ],
      s.median_snr === null
        ? null
        : [
            "Weight error",
            `${s.median_snr.toFixed(1)} dB`,
            `median; worst ${s.worst_snr.toFixed(1)} dB`,
          ],
      ["Modules", count(s.quantized), `quantized; ${count(s.left)} weights not quantized`],
      s.tokens ? ["Tokens", count(s.tokens), `most per module; fewest ${count(fewest)}`] : null,
      [
        "Time",
        duration(s.seconds),
        s.peak_memory === null ? null : `peak memory ${bytes(s.peak_memory)}`,
      ],
    ]),
    el(
      "div",
      { class: "scroll", tabindex: 0, role: "region", "aria-label": "Schemes" },
      el(
        "table",
        { class: "schemes" },
        el(
          "thead",
          {},
          el(
            "tr",
            {},
            ["Scheme", "Modules", "Weights", "Inputs", "Format"].map((h) =>
              el("th", { scope: "col" }, h),
            ),
          ),
        ),
        el(
          "tbody",
          {},
          s.schemes.map((use) =>
            el(
              "tr",
              {},
              el("th", { scope: "row" }, use.label),
              el("td", {}, count(use.modules)),
              el("td", { class: "word" }, use.weights ?? "not quantized"),
              el("td", { class: "word" }, use.inputs ?? "not quantized"),
              el("td", { class: "word" }, use.format),
            ),
          ),
        ),
      ),
    ),
  );
}
