"""A whole run beside llm-compressor's: from the command to the finished folder.

Every run is a process of its own, so imports, reading, calibration, search and writing all count.
Both sides get the same folder, the same scheme, the same observers and the same token ids, and run
in turn; the least of each counts. `wait4` tells CPU time and peak memory of a process that ended.

    python benchmarks/whole_run.py MODEL --text FILE --python OURS --peer-python PEER [--json FILE]
    python benchmarks/whole_run.py qwen2 ...     # random weights in the shapes of Qwen2-0.5B

With `--json`, a case keeps the side that the file has and that is not run again (`--sides`).

"Extra memory" is the peak without the size of the model's files, and without the peak of a process
that only imports what the run does. It is below zero for a run that never holds the whole model.
Pages of mapped files count, though the system may drop them; "private memory" is what it may not.
This process must stay small: a child's peak starts from what its parent holds when it is started.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES, LENGTH = 64, 512
SIDES = ("peer", "ours")
RANDOM = "qwen2"
INT4 = {"num_bits": 4, "strategy": "group", "group_size": 64}
CASES: dict[str, dict] = {
    "W4A16 group 64, MSE search": {
        "calibrated": False,
        "wanted": 8,
        "scheme": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "strategy": "group",
                "group_size": 64,
                "observer": "memoryless_mse",
            },
        },
    },
    "W8A8 static, calibrated": {
        "calibrated": True,
        "wanted": 2,
        "scheme": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"},
            "input_activations": {"num_bits": 8, "strategy": "tensor", "observer": "minmax"},
        },
    },
    "W4A16 group 64, GPTQ as each side has it by default": {
        "calibrated": True,
        "wanted": 2.5,
        "modifier": "GPTQModifier",
        "scheme": {"targets": ["Linear"], "weights": INT4},
    },
    "W4A16 group 64, importance only": {
        "calibrated": True,
        "wanted": 2,
        "gathers": True,  # the peer's observer does so unasked
        "scheme": {"targets": ["Linear"], "weights": INT4},
        "observers": {"peer": "imatrix_mse", "ours": "optimal"},
    },
    "W4A16 group 64, GPTQ without drift correction and refinement": {
        "calibrated": True,
        "wanted": 2.5,
        "modifier": "GPTQModifier",
        "options": {"ours": {"drift_correction": False, "refinements": 0}},
        "scheme": {"targets": ["Linear"], "weights": INT4},
    },
}


# ---- in a process of its own ----


def import_side(side: str, *_: str) -> None:
    """Import what a run of a side imports."""
    import transformers  # noqa: F401

    entry_point(side)


def entry_point(side: str) -> tuple[Any, dict[str, Any]]:
    """Return the `oneshot` of a side, and its modifiers by name."""
    if side == "peer":
        from llmcompressor import oneshot
        from llmcompressor.modifiers import gptq, quantization

        return oneshot, {**vars(quantization), **vars(gptq)}
    from steelyard import modifiers, oneshot

    return oneshot, vars(modifiers)


def run_side(side: str, name: str, model: str, tokens: str, output: str) -> None:
    case = CASES[name]
    oneshot, modifiers = entry_point(side)
    options: dict = {}
    if case["calibrated"]:  # loaders, since the peer's sampler does not keep the order of a dataset
        import torch

        rows = [{"input_ids": torch.tensor(row)} for row in json.loads(Path(tokens).read_text())]
        options = {
            "dataset": torch.utils.data.DataLoader(rows, batch_size=1),
            "num_calibration_samples": len(rows),
            "max_seq_length": LENGTH,
        }
    scheme = case["scheme"]
    if "observers" in case:
        weights = scheme["weights"] | {"observer": case["observers"][side]}
        scheme = scheme | {"weights": weights}
    main = modifiers[case.get("modifier", "QuantizationModifier")]
    more = case.get("options", {}).get(side, {})
    recipe = [main(config_groups={"group_0": scheme}, ignore=["lm_head"], **more)]
    if case.get("gathers") and side == "ours":
        recipe.insert(0, modifiers["IMatrixGatherer"]())
    oneshot(model=model, recipe=recipe, output_dir=output, **options)


def tokenize(model: str, text: str, samples: str, output: str) -> None:
    """Write rows to calibrate with: of a text, or random ones."""
    count = int(samples)
    if text == "-":
        import torch
        from transformers import AutoConfig

        most = AutoConfig.from_pretrained(model).vocab_size
        generator = torch.Generator().manual_seed(1)
        rows = torch.randint(0, most, (count, LENGTH), generator=generator).tolist()
    else:
        from transformers import AutoTokenizer

        prose = Path(text).read_text(encoding="utf-8")[: 8 * count * LENGTH]
        ids = AutoTokenizer.from_pretrained(model)(prose)["input_ids"][: count * LENGTH]
        rows = [ids[start : start + LENGTH] for start in range(0, len(ids), LENGTH)]
    Path(output).write_text(json.dumps(rows))


def make_random(folder: str, layers: str) -> None:
    """Write a checkpoint with random weights in the shapes of Qwen2-0.5B, which has 24 layers."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=151936,
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=int(layers),
        num_attention_heads=14,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        dtype="bfloat16",
    )
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def compare(first: str, second: str) -> dict[str, dict[str, float]]:
    """Return, per kind of tensor, the share of equal values and the largest relative distance."""
    from safetensors import safe_open

    found: dict[str, dict[str, float]] = {}
    files = [Path(folder) / "model.safetensors" for folder in (first, second)]
    with safe_open(files[0], "pt") as a, safe_open(files[1], "pt") as b:
        assert set(a.keys()) == set(b.keys()), set(a.keys()) ^ set(b.keys())
        for name in sorted(set(a.keys())):
            x, y = a.get_tensor(name), b.get_tensor(name)
            assert (x.shape, x.dtype) == (y.shape, y.dtype), name
            kind = found.setdefault(name.rpartition(".")[2], {"equal": 0, "count": 0, "off": 0})
            kind["equal"] += int((x == y).sum())
            kind["count"] += x.numel()
            if name.endswith("_scale"):
                kind["off"] = max(kind["off"], float(((x - y).abs() / y.abs()).max()))
    return {kind: {**f, "equal": f["equal"] / f["count"]} for kind, f in found.items()}


def versions(*names: str) -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in names}


def cpu_features() -> list[str]:
    """Return the processor's flags that the kernels use."""
    from steelyard import kernels

    found: list[str] = kernels.info()["cpu_features"]
    return found


TASKS = {
    "features": cpu_features,
    "import": import_side,
    "run": run_side,
    "tokenize": tokenize,
    "make": make_random,
    "compare": compare,
    "versions": versions,
}


# ---- the one that starts them ----


def measured(command: list[str]) -> dict[str, float]:
    """Run a command to its end; return seconds, and bytes of its peak memory.

    peak:    resident, with the pages of files that are mapped; the system may drop those
    private: the rest, as sampled
    """
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    private = 0
    os.sync()  # or a run that waits for its files to be on the disk waits for the last one's too
    with tempfile.TemporaryFile() as printed:
        started = time.perf_counter()
        process = subprocess.Popen(command, env=environment, stdout=printed, stderr=printed)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            private = max(private, private_bytes(process.pid))
            time.sleep(0.01)
        wall = time.perf_counter() - started
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            printed.seek(0)
            raise SystemExit(f"{' '.join(command)}\n{printed.read().decode(errors='replace')}")
    cpu = usage.ru_utime + usage.ru_stime
    return {"wall": wall, "cpu": cpu, "peak": usage.ru_maxrss * 1024, "private": private}


def private_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    return 0  # it just ended


def asked(python: str, kind: str, *arguments: object, script: str = __file__) -> Any:
    """Do one of a script's TASKS in another environment; return what it found."""
    command = [python, script, kind, *map(str, arguments)]
    found = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    return json.loads(found.stdout.splitlines()[-1])


def beginning(model: str | Path, tokenizer: Any) -> list[int]:
    """Return the tokens that every text begins with: those that the tokenizer adds.

    Gemma was trained with <bos> before each text. Tokenizers made from GGUF files do not add it.
    """
    from transformers import AutoConfig

    added: list[int] = tokenizer("")["input_ids"]
    if not added and AutoConfig.from_pretrained(model).model_type.startswith("gemma"):
        return [tokenizer.bos_token_id]
    return added


def least(runs: list[dict[str, float]]) -> dict[str, float]:
    return {name: min(run[name] for run in runs) for name in runs[0]}


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Return the mean over samples, and its standard error."""
    mean = sum(values) / len(values)
    spread = math.sqrt(sum((each - mean) ** 2 for each in values) / (len(values) - 1))
    return mean, spread / math.sqrt(len(values))


def run_case(
    name: str, options: argparse.Namespace, scratch: Path, tokens: Path, kept: dict
) -> dict:
    pythons = {"peer": options.peer_python, "ours": options.python}
    outputs = {side: scratch / side for side in SIDES}

    def command(side: str, kind: str) -> list[str]:
        given = [str(path) for path in (options.model, tokens, outputs[side])]
        return [pythons[side], __file__, kind, side, name, *given]

    load = os.getloadavg()
    print(f"{name}: load", *(f"{each:.1f}" for each in load), flush=True)
    sides = [side for side in SIDES if side in options.sides]
    imports = {s: least([measured(command(s, "import")) for _ in range(2)]) for s in sides}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for side in sides * options.runs + (["ours"] if options.runs > 1 else []):
        shutil.rmtree(outputs[side], ignore_errors=True)
        runs[side].append(measured(command(side, "run")))
        r = runs[side][-1]
        print(
            f"{name:<28} {side:<5} {r['wall']:7.2f} s, CPU {r['cpu']:7.2f} s, "
            f"peak {r['peak'] / 1e6:6.0f} MB, private {r['private'] / 1e6:6.0f} MB",
            flush=True,
        )
    imports, runs = {**kept.get("imports", {}), **imports}, {**kept.get("runs", {}), **runs}
    weights = sum(f.stat().st_size for f in options.model.glob("*.safetensors"))
    best = {side: least(runs[side]) for side in runs}
    found = {
        "case": name,
        "model bytes": weights,
        "imports": imports,
        "runs": runs,
        **best,
        "extra": {s: best[s]["peak"] - imports[s]["peak"] - weights for s in runs},
        "extra private": {s: best[s]["private"] - imports[s]["private"] for s in runs},
        "wanted": CASES[name]["wanted"],
        "load": load,
    }
    if len(runs) == len(SIDES):
        found["faster"] = best["peer"]["wall"] / best["ours"]["wall"]
        found["faster, CPU"] = best["peer"]["cpu"] / best["ours"]["cpu"]
    if all(folder.exists() for folder in outputs.values()):
        found["compared"] = asked(options.python, "compare", *(outputs[s] for s in SIDES))
    return found


def print_table(results: list[dict]) -> None:
    for r in results:
        gain = f"{r['faster, CPU']:.1f} x less CPU" if "faster" in r else "one side"
        print(f"\n{r['case']}: {gain} (wanted {r['wanted']} x); with imports only")
        for side in r["runs"]:
            only = r["imports"][side]
            print(
                f"  {side:<5} {r[side]['wall']:7.2f} s ({only['wall']:.2f}), CPU "
                f"{r[side]['cpu']:7.2f} s ({only['cpu']:.2f}), peak {r[side]['peak'] / 1e6:5.0f} MB"
                f" ({only['peak'] / 1e6:.0f}), extra {r['extra'][side] / 1e6:5.0f} MB, private "
                f"{r['extra private'][side] / 1e6:5.0f} MB"
            )
        for kind, f in r.get("compared", {}).items():
            print(f"  {kind}: {f['equal']:.4%} equal, scales off by up to {f['off']:.2g}")


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="calibration text; else random tokens")
    parser.add_argument("--python", default=sys.executable, help="of ours")
    parser.add_argument("--peer-python", default=sys.executable, help="of llm-compressor's")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--layers", type=int, default=24, help="of the random model")
    parser.add_argument("--sides", nargs="*", choices=SIDES, default=SIDES)
    parser.add_argument("--runs", type=int, default=2, help="of each side; ours runs once more")
    parser.add_argument("--cases", type=int, nargs="*", help="numbers of the cases; else all")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    shared = ["torch", "transformers", "compressed-tensors"]
    names = list(CASES)
    chosen = names if options.cases is None else [names[i] for i in options.cases]
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results = {r["case"]: r for r in before.get("results", ())}
    machine = {"processor": processor(), "cores": os.cpu_count()}
    machine["features"] = asked(options.python, "features")
    print(machine["processor"], *machine["features"])
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokens = scratch / "tokens.json"
        title = options.model.name
        if title == RANDOM and not options.model.exists():
            options.model = scratch / RANDOM
            asked(options.python, "make", options.model, options.layers)
            title = f"{RANDOM}, {options.layers} layers, random weights and tokens"
            options.text = None  # it has no tokenizer
        given = [options.model, options.text or "-", options.samples, tokens]
        asked(options.python, "tokenize", *given)
        for name in chosen:
            results[name] = run_case(name, options, scratch, tokens, results.get(name, {}))
            if options.json:
                outcome = {
                    "model": title,
                    "calibration": f"{options.samples} x {LENGTH} tokens",
                    "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
                    "machine": machine,
                    "versions": {
                        "peer": asked(options.peer_python, "versions", "llmcompressor", *shared),
                        "ours": asked(options.python, "versions", *shared),
                    },
                    "results": list(results.values()),
                }
                options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    print_table([results[name] for name in chosen])


def processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
