"""Write the tables of benchmarks/README.md from the results beside it."""

from __future__ import annotations

import json
from pathlib import Path

HERE = Path(__file__).parent
START, END = "<!-- results: {} -->", "<!-- end of results -->"


def speed_table(found: dict) -> str:
    lines = [
        f"{found['machine']['processor']}, {found['machine']['cores']} cores, "
        f"{found['versions']['instruction_set']}; weights {found['rows']} x 4096.",
        "",
        "| case | type | threads | peer CPU s | ours CPU s | peer wall s | ours wall s | faster "
        "| wanted | reads |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        wanted = f"{r['wanted']:g}x" if r["wanted"] else ""
        reads = f"{r['to_floor']:.1f}" if r["to_floor"] else ""
        lines.append(
            f"| {r['case']} | {r['dtype']} | {r['threads']} | {r['peer_cpu']:.4f} | {r['cpu']:.4f} "
            f"| {r['peer_wall']:.4f} | {r['wall']:.4f} | {r['ratio']:.1f}x | {wanted} | {reads} |"
        )
    lines += ["", "| search | extra memory, of the tensor | its result alone |", "|---|---|---|"]
    for r in found["memory"]:
        lines.append(f"| {r['case']} | {r['extra']:.1%} | {r['statistics']:.1%} |")
    return "\n".join(lines)


def quality_table(found: dict) -> str:
    lines = [
        f"{found['model']}: calibrated on {found['calibration']}, evaluated on "
        f"{found['evaluation']}; perplexity {found['bf16 perplexity']:.3f} in bf16.",
        "",
        "| format | observer | relative squared error | perplexity | KL divergence |",
        "|---|---|---|---|---|",
    ]
    for r in found["results"]:
        lines.append(
            f"| {r['format']} | {r['row']} | {r['error']:.6f} | {r['perplexity']:.3f} "
            f"| {r['kl']:.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    for path in sorted((HERE / "results").glob("*.json")):
        found = json.loads(path.read_text(encoding="utf-8"))
        table = quality_table(found) if "model" in found else speed_table(found)
        start = START.format(path.stem)
        if start not in text:
            text += f"\n{start}\n{END}\n"
        head, _, rest = text.partition(start)
        tail = rest.partition(END)[2]
        text = f"{head}{start}\n\n{table}\n\n{END}{tail}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
