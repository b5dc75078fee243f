"""Write the tables of benchmarks/README.md from the results beside it."""

from __future__ import annotations

import json
from pathlib import Path

from whole_run import mean_and_error

HERE = Path(__file__).parent
START, END = "<!-- results: {} -->", "<!-- end of results -->"


def speed_table(found: dict) -> str:
    by_case: dict[str, dict[tuple[str, int], dict]] = {}
    for r in found["results"]:
        by_case.setdefault(r["case"], {})[r["dtype"], r["threads"]] = r
    lines = [
        f"{found['machine']['processor']}, {found['machine']['cores']} cores, "
        f"{found['versions']['instruction_set']}; weights {found['rows']} x 4096. Milliseconds of "
        "CPU on one thread.",
        "",
        "| case | peer, bf16 | ours | ns per weight | faster | wanted "
        f"| {found['rows'] // 4:,} rows: faster | reads | fp32 faster | 2 threads over 1 |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case, runs in by_case.items():
        r = runs["bf16", 1]
        wanted = f"{r['wanted']:g}x" if r["wanted"] else ""
        reads = f"{r['to_floor']:.1f}" if r["to_floor"] else ""
        each = f"{r['ns_per_weight']:.2f}" if r.get("ns_per_weight") else ""
        few = f"{r['quarter']:.1f}x" if r.get("quarter") else ""
        wide = f"{runs['fp32', 1]['ratio']:.1f}x" if ("fp32", 1) in runs else ""
        two = f"{r['wall'] / runs['bf16', 2]['wall']:.2f}x" if ("bf16", 2) in runs else ""
        lines.append(
            f"| {case} | {1000 * r['peer_cpu']:.1f} | {1000 * r['cpu']:.2f} | {each} "
            f"| {r['ratio']:.1f}x "
            f"| {wanted} | {few} | {reads} | {wide} | {two} |"
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


def norms_table(found: dict) -> str:
    """KL divergence by norm; differences from `memoryless_mse` are over the same samples."""
    lines = [
        f"{found['model']}: KL divergence and its standard error on {found['evaluation']}.",
        "",
        "| weights | text | observer | relative squared error | KL divergence "
        "| above `memoryless_mse` |",
        "|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        name = r["row"] if r["row"] == "memoryless_mse" else f"optimal, {r['row']}"
        more = "" if name == r["row"] else "{:+.4f} ± {:.4f}".format(*r["above memoryless_mse"])
        lines.append(
            f"| {r['format']} | {r['text']} | {name} | {r['error']:.6f} "
            f"| {r['kl'][0]:.4f} ± {r['kl'][1]:.4f} | {more} |"
        )
    return "\n".join(lines)


def negative_scales_table(found: dict) -> str:
    scales = found["scales"]["negative"]
    lines = [
        f"{found['model']}, int4 group {found['group size']}: {scales['negative scales']:,} of "
        f"{scales['scales']:,} scales are negative. Relative squared error "
        f"{scales['relative squared error']:.6f}, and "
        f"{found['scales']['positive']['relative squared error']:.6f} with positive scales only. "
        f"Log-probabilities of {found['evaluated']}; mean / largest difference.",
        "",
        "| server | scales | type | weights off by | packed from dense | dense from transformers |",
        "|---|---|---|---|---|---|",
    ]
    for key, r in found["transformers"].items():
        kind, dtype = key.split()
        lines.append(f"| transformers | {kind} | {dtype} | {r['weights']:g} | {r['logits']:g} | |")
    for key, r in found["vllm"].items():
        kind, dtype = key.split()
        packed, noise = (
            f"{r[pair]['mean']:.4f} / {r[pair]['max']:.3f}"
            for pair in ("vllm dense", "of the dense ones")
        )
        lines.append(f"| vLLM | {kind} | {dtype} | {r['weights']:g} | {packed} | {noise} |")
    return "\n".join(lines)


def serving_table(found: dict) -> str:
    versions = found["versions"]
    layers = ["off", "off with vLLM's rounding", "off, weight scale doubled"]
    layers.append("off, input scale doubled")
    lines = [
        f"{found['model']} in {found['dtype']}; vLLM {versions['vllm']}, transformers "
        f"{versions['transformers']}, compressed-tensors {versions['compressed-tensors']}. The "
        f"worst of {found['results'][0]['layers']['count']} layers on {found['layers on']}, then "
        f"log-probabilities of {found['evaluated']}, mean / largest difference.",
        "",
        "| scheme | worst layer | with vLLM's rounding | weight scale doubled "
        "| input scale doubled | log-probabilities | rounding alone | scales doubled |",
        "|---|---|---|---|---|---|---|---|",
    ]
    kernels: dict[str, list[str]] = {}
    for r in found["results"]:
        if "error" in r:
            lines.append(f"| {r['scheme']} | not served | | | | | | |")
            kernels.setdefault(r["error"].partition(". ")[0], []).append(r["scheme"])
            continue
        kernels.setdefault(", ".join(r["kernels"]), []).append(r["scheme"])
        cells = [f"{r['layers'][c]:.2%}" if c in r["layers"] else "" for c in layers]
        cells += [
            f"{r[column]['mean']:.4f} / {r[column]['max']:.3f}" if column in r else ""
            for column in ("difference", "rounding", "damaged")
        ]
        lines.append(f"| {r['scheme']} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- {kernel}: {'; '.join(schemes)}." for kernel, schemes in kernels.items()]
    return "\n".join(lines)


def expert_loading_table(found: dict) -> str:
    versions, results = found["versions"], found["results"]
    columns = list(dict.fromkeys(r["scheme"] for r in results))
    ok = [r for r in results if r["result"] == "ok"]
    tensors, experts = (sum(r[kind] for r in ok) for kind in ("tensors", "of experts"))
    lines = [
        f"vLLM {versions['vllm']}; small random models of transformers "
        f"{versions['transformers']}. {len(ok)} checkpoints are ok, with {tensors:,} tensors, "
        f"{experts:,} of them of experts.",
        "",
        f"| family | {' | '.join(columns)} |",
        "|---" * (len(columns) + 1) + "|",
    ]
    reasons: dict[str, int] = {}
    for family in dict.fromkeys(r["family"] for r in results):
        cells = []
        for r in (r for r in results if r["family"] == family):
            if "reason" in r:
                number = reasons.setdefault(r["reason"], len(reasons) + 1)
                cells.append(f"{r['result']} ({number})")
            else:
                cells.append(r["result"])
        lines.append(f"| {family} | {' | '.join(cells)} |")
    lines.append("")
    lines += [f"{number}. {reason}" for reason, number in reasons.items()]
    return "\n".join(lines)


def whole_run_table(found: dict) -> str:
    versions = found["versions"]
    threads = {1: ", one thread", 2: ", two threads"}.get(found.get("threads", 0), "")
    lines = [
        f"{found['model']}, {found['results'][0]['model bytes'] / 1e6:.0f} MB; calibrated on "
        f"{found['calibration']}; {found['machine']['processor']}, {found['machine']['cores']} "
        f"cores{threads}; llm-compressor {versions['peer']['llmcompressor']}. In brackets, a "
        "process that only imports.",
        "",
        "| case | | wall, s | CPU, s | peak, MB | extra, MB | private, MB | faster | less CPU "
        "| without imports | wanted |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        for side, label in (("peer", "llm-compressor"), ("ours", "ours")):
            if side not in r:
                continue
            best, only = r[side], r["imports"][side]
            cells = [r["case"] if side == "peer" else "", label]
            cells += [f"{best[name]:.1f} ({only[name]:.1f})" for name in ("wall", "cpu")]
            cells += [f"{best['peak'] / 1e6:.0f} ({only['peak'] / 1e6:.0f})"]
            cells += [f"{r[name][side] / 1e6:.0f}" for name in ("extra", "extra private")]
            gains = ["", "", "", ""]
            if side == "ours" and "peer" in r:
                less = r["peer"]["cpu"] / r["ours"]["cpu"]
                bare = [r[s]["cpu"] - r["imports"][s]["cpu"] for s in ("peer", "ours")]
                gains = [f"{r['faster']:.1f}x", f"{less:.1f}x", f"{bare[0] / bare[1]:.1f}x"]
                gains.append(f"{r['wanted']}x")
            cells += gains
            lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    for r in (r for r in found["results"] if "compared" in r):
        told = [
            f"{kind} {f['equal']:.2%}" + (f" (off by up to {f['off']:.1g})" if f["off"] else "")
            for kind, f in sorted(r["compared"].items())
        ]
        lines.append(f"- {r['case']}: equal in both checkpoints are {', '.join(told)}.")
    return "\n".join(lines)


def streaming_table(found: dict) -> str:
    results, sizes = found["results"], found["sizes"]
    copy = results["copy"]["ours"]
    lines = [
        f"{sizes['large'] / 1e9:.1f} GB of bf16 in Llama's shapes; "
        f"{found['machine']['processor']}, {found['machine']['cores']} cores; imports not counted, "
        "the source in the page cache. "
        f"Beside llm-compressor {found.get('peer', {}).get('llmcompressor', '')} on "
        f"{sizes.get('small', 0) / 1e9:.1f} GB.",
        "",
        "| case | wall, s | GB/s | CPU, s | peak, MB | of a copy | its CPU | wanted "
        "| model_free_ptq, s | ours, s | faster | its peak, MB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, r in results.items():
        ours = r["ours"]
        wanted = found["wanted"].get(name)
        cells = [
            name,
            f"{ours['wall']:.1f}",
            f"{sizes['large'] / 1e9 / ours['wall']:.2f}",
            f"{ours['cpu']:.1f}",
            f"{ours['peak'] / 1e6:.0f}",
            f"{ours['wall'] / copy['wall']:.2f}x",
            f"{ours['cpu'] / copy['cpu']:.2f}x",
            f"{wanted:g}x" if wanted else "",
        ]
        small = r.get("small")
        if small:
            peer, mine = small["peer"], small["ours"]
            cells += [f"{peer['wall']:.1f}", f"{mine['wall']:.1f}"]
            cells += [f"{peer['wall'] / mine['wall']:.1f}x", f"{peer['peak'] / 1e6:.0f}"]
        else:
            cells += ["", "", "", ""]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


SIDES = {"peer": "llm-compressor", "tuner": "AutoRound", "ours": "ours"}


def gptq_table(found: dict) -> str:
    texts = list(found["plain"])
    before = " and ".join(f"{found['plain'][t]['perplexity']:.3f} ({t})" for t in texts)
    packages = {"peer": "llmcompressor", "tuner": "auto-round"}
    peers = [
        f"{SIDES[side]} {version[packages[side]]}"
        for side, version in found["versions"].items()
        if side in packages
    ]
    cores = f"{found['machine']['cores']} cores"
    imports = [f"{SIDES[s]} {found['imports'][s]['cpu']:.1f} s" for s in found["imports"]]
    lines = [
        f"{found['model']}, groups of {found['group']}; calibrated on {found['calibration']}; "
        f"perplexity {before} before; {found['machine']['processor']}, "
        f"{'; '.join([cores, *peers])}. Imports alone take, in CPU time: "
        f"{', '.join(imports)}.",
        "",
        "| row | | wall, s | CPU, s | peak, MB "
        f"| {' | '.join(f'KL, {t} | perplexity' for t in texts)} "
        "| CPU, of ours | without imports |",
        "|---" * (7 + 2 * len(texts)) + "|",
    ]
    rows: dict[tuple[str, int], dict[str, dict]] = {}
    for r in found["results"]:
        rows.setdefault((r["row"], r["draw"]), {})[r["side"]] = r
    for (name, draw), sides in rows.items():
        label = name if draw == 0 else f"{name}, draw {draw + 1}"
        for side in (s for s in SIDES if s in sides):
            run, ours = sides[side], sides.get("ours")
            cells = [label, SIDES[side], f"{run['wall']:.1f}", f"{run['cpu']:.1f}"]
            cells += [f"{run['peak'] / 1e6:.0f}"]
            label = ""
            for text in texts:
                value = run["texts"][text]
                error = f" ± {value['error']:.4f}" if "error" in value else ""
                cells += [f"{value['kl']:.4f}{error}", f"{value['perplexity']:.3f}"]
            if ours is None or side == "ours":
                cells += ["", ""]
            else:
                bare = [r["cpu"] - found["imports"][r["side"]]["cpu"] for r in (run, ours)]
                cells += [f"{run['cpu'] / ours['cpu']:.2f}x", f"{bare[0] / bare[1]:.2f}x"]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def gptq_solve_table(found: dict) -> str:
    lines = [
        "| rows x columns, group | peer, ms of CPU | ours | faster | its loss over ours |",
        "|---|---|---|---|---|",
    ]
    for r in found["results"]:
        peer, ours = r["peer"], r["ours"]
        lines.append(
            f"| {r['rows']} x {r['columns']}, {r['group']} | {1000 * peer['cpu']:.0f} "
            f"| {1000 * ours['cpu']:.0f} | {peer['cpu'] / ours['cpu']:.1f}x "
            f"| {peer['loss'] / ours['loss']:.4f} |"
        )
    lines += [
        "",
        f"The Hessian of 512 inputs, {found['instruction set']}, ms of CPU. The fp32 products are "
        "torch's, slab by slab; the drift is the full matrix of differences by inputs, in bf16.",
        "",
        "| columns | peer | fp32 products | fp32 inputs | bf16 inputs | of fp32 products | drift |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found["hessians"]:
        times = {side: 1000 * taken["cpu"] for side, taken in r["sides"].items()}
        cells = [f"{times[k]:.2f}" for k in ("peer", "fp32 products", "fp32 inputs", "bf16 inputs")]
        faster = f"{times['fp32 products'] / times['bf16 inputs']:.2f}x"
        lines.append(f"| {r['columns']} | {' | '.join(cells)} | {faster} | {times['drift']:.2f} |")
    return "\n".join(lines)


def ranks_table(found: dict) -> str:
    machine = found["machine"]
    runs = f"GPTQ of {found['model']} (64 samples of 512 tokens), and a stream"
    lines = [
        f"{runs} of {found['gigabytes']:g} GB of bf16; {machine['processor']}, "
        f"{machine['cores']} cores, one thread a rank; imports not counted.",
        "",
        "| run | one rank, s | two, s | faster | wanted | CPU, s | of both, s | exchange | same |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for r in found["results"]:
        one, two = r["one"], r["two"]
        lines.append(
            f"| {r['case']} | {one['wall']:.1f} | {two['wall']:.1f} | {r['ratio']:.2f}x "
            f"| {r['wanted']:g}x | {one['cpu']:.1f} | {two['cpu']:.1f} | {two['exchange']:.1%} "
            f"| {'yes' if r['same'] else 'no'} |"
        )
    return "\n".join(lines)


def activations_table(found: dict) -> str:
    schemes = list(dict.fromkeys(r["scheme"] for r in found["results"]))
    cells = {(r["row"], r["scheme"]): f"{r['kl']:.4f} ± {r['error']:.4f}" for r in found["results"]}
    lines = [
        f"{found['model']}: calibrated on {found['calibration']}, evaluated on "
        f"{found['evaluation']}.",
        "",
        f"| inputs | {' | '.join(f'{s}, KL divergence' for s in schemes)} |",
        "|---" * (len(schemes) + 1) + "|",
    ]
    for row in dict.fromkeys(r["row"] for r in found["results"]):
        shown = (cells.get((row, scheme), "") for scheme in schemes)
        lines.append(f"| {row} | {' | '.join(shown)} |")
    return "\n".join(lines)


def activation_speed_table(found: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    lines = [
        f"{found['processor']}; {versions}; one thread, CPU time.",
        "",
        "| observer | fp32, ns per value | bf16 | choosing the range, ms |",
        "|---|---|---|---|",
    ]
    by_side: dict[str, dict[str, dict]] = {}
    for r in found["results"]:
        by_side.setdefault(r["side"], {})[r["dtype"]] = r
    for side, r in by_side.items():
        wide, narrow = r["float32"], r["bfloat16"]
        lines.append(
            f"| {side} | {wide['ns']:.2f} | {narrow['ns']:.2f} | {narrow['solve_ms']:.1f} |"
        )
    return "\n".join(lines)


def transforms_table(found: dict) -> str:
    lines = [
        f"{found['model']}, {found['samples']} calibration samples; "
        f"{found['machine']['processor']}.",
        "",
        "| scheme | transform | KL divergence | above that without it | CPU, s | peak, MB |",
        "|---|---|---|---|---|---|",
    ]
    texts = {
        name: next(each for each in row.values() if isinstance(each, dict))
        for name, row in found["results"].items()
    }
    for name, row in found["results"].items():
        scheme, _, step = name.partition(": ")
        kl = texts[name]
        plain = f"{scheme}: {'GPTQ' if 'GPTQ' in step else 'no transform'}"
        ours = texts.get(plain, {})
        digests = {r["tokens"] for r in (row, found["results"].get(plain, {})) if "tokens" in r}
        same = plain != name and len(digests) <= 1
        more = _above(ours.get("samples"), kl.get("samples")) if same else ""
        peak = f"{row['peak_bytes'] / 1e6:.0f}" if "peak_bytes" in row else ""
        lines.append(
            f"| {scheme} | {step} | {kl['kl']:.4f} ± {kl['error']:.4f} | {more} "
            f"| {row['cpu_seconds']:.0f} | {peak} |"
        )
    return "\n".join(lines)


def _above(before: list[float] | None, after: list[float] | None) -> str:
    """Return the mean difference over the same samples, and its standard error."""
    if before is None or after is None:
        return ""
    mean, error = mean_and_error([b - a for a, b in zip(before, after, strict=True)])
    return f"{mean:+.4f} ± {error:.4f}"


def script_checkpoints_table(found: dict) -> str:
    versions = found["versions"]
    lines = [
        f"The included model; llm-compressor {versions['llmcompressor']}, compressed-tensors "
        f"{versions['compressed-tensors']}, transformers {versions['transformers']}.",
        "",
        "| script | tensors | other name, type or shape | equal bytes, by kind of tensor |",
        "|---|---|---|---|",
    ]
    for r in found["results"]:
        if "equal bytes" not in r:
            failed = " and ".join(SIDES[side] for side, ended in r["finished"].items() if not ended)
            lines.append(f"| {r['script']} | not compared: fails with {failed} | | |")
            continue
        shares = (f"{k} {v:.2%}" for k, v in r["equal bytes"].items() if k != "weight_shape")
        lines.append(
            f"| {r['script']} | {r['tensors']} | {len(r['different'])} | {', '.join(shares)} |"
        )
    return "\n".join(lines)


TABLES = {
    "script-checkpoints": script_checkpoints_table,
    "activations": activations_table,
    "activation-speed": activation_speed_table,
    "transforms": transforms_table,
    "ranks": ranks_table,
    "gptq": gptq_table,
    "solve": gptq_solve_table,
    "streaming": streaming_table,
    "speed": speed_table,
    "quality": quality_table,
    "norms": norms_table,
    "negative": negative_scales_table,
    "serving": serving_table,
    "expert-loading": expert_loading_table,
    "whole": whole_run_table,
}


def main() -> None:
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    for path in sorted((HERE / "results").glob("*.json")):
        kind = path.stem if path.stem in TABLES else path.stem.partition("-")[0]
        if kind not in TABLES:  # of another page, such as the demo's model
            continue
        table = TABLES[kind](json.loads(path.read_text(encoding="utf-8")))
        start = START.format(path.stem)
        if start not in text:
            print(f"{path.name}: the page has no marker for it, {start}")
            continue
        head, _, rest = text.partition(start)
        tail = rest.partition(END)[2]
        text = f"{head}{start}\n\n{table}\n\n{END}{tail}"
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
