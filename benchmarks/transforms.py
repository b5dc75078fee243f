"""What transforms that fold into the weights are worth, beside the same scheme without them.

Each row is a process of its own that quantizes MODEL with the same calibration tokens. The written
checkpoint is compared with the original as it would be served, inputs rounded too: KL divergence on
held-out text, with its standard error over samples.

    python benchmarks/transforms.py MODEL --text FILE [--samples 16] [--rows NAME ...] [--json FILE]

Rows that FILE has already are kept, so rows can be measured one after another.
"""

from __future__ import annotations

import argparse
import functools
import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rounding import tokenize
from whole_run import asked, mean_and_error, processor, versions

INT8 = {"num_bits": 8, "strategy": "channel"}
STATIC = {"weights": INT8, "input_activations": {"num_bits": 8, "strategy": "tensor"}}
DYNAMIC = {
    "weights": INT8,
    "input_activations": {"num_bits": 8, "strategy": "token", "dynamic": True},
}
FLOAT8 = {"num_bits": 8, "type": "float", "strategy": "tensor"}
SCHEMES: dict[str, Any] = {
    "W8A8 static per tensor": STATIC,
    "W8A8 dynamic": DYNAMIC,
    "FP8 static": {"weights": FLOAT8, "input_activations": FLOAT8},
    "W4A16 group 64": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}},
    "W4A16 group 32": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    "NVFP4": "NVFP4",
    "MXFP4": "MXFP4",
}
WITH_R4 = {"rotations": ["R1", "R2", "R4"], "transform_type": "random-hadamard"}
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "no transform": [],
    "SmoothQuant 0.5": [("SmoothQuantModifier", {})],
    "SmoothQuant 0.8": [("SmoothQuantModifier", {"smoothing_strength": 0.8})],
    "AWQ": [("AWQModifier", {})],
    "auto": [("TransformModifier", {})],
    "dynamic where needed": [],
    "auto, dynamic where needed": [("TransformModifier", {})],
    "SpinQuant": [("SpinQuantModifier", {}), ("IMatrixGatherer", {})],
    "SpinQuant with R4": [("SpinQuantModifier", WITH_R4), ("IMatrixGatherer", {})],
    "GPTQ": [],
    "SpinQuant, GPTQ": [("SpinQuantModifier", {})],
    "AWQ, GPTQ": [("AWQModifier", {})],
    "auto, GPTQ": [("TransformModifier", {})],
}
ROWS = [f"{scheme}: {step}" for scheme in SCHEMES for step in STEPS]


# ---- in a process of its own ----


def row(model: str, name: str, tokens: str) -> dict[str, Any]:
    import torch

    from steelyard import modifiers, oneshot
    from steelyard.evaluate import evaluate

    texts = {key: torch.tensor(ids) for key, ids in json.loads(Path(tokens).read_text()).items()}
    calibration = texts.pop("calibration")
    scheme, _, step = name.partition(": ")
    recipe: list[Any] = [getattr(modifiers, kind)(**given) for kind, given in STEPS[step]]
    last = modifiers.GPTQModifier if "GPTQ" in step else modifiers.QuantizationModifier
    given: Any = {"scheme": scheme}
    if scheme != SCHEMES[scheme]:  # no preset
        given = {"config_groups": {"group_0": {"targets": ["Linear"], **SCHEMES[scheme]}}}
    recipe.append(last(**given, ignore=["lm_head"]))
    if not STEPS[step] and "GPTQ" not in step:  # weights are weighted by importance in all rows
        recipe.insert(0, modifiers.IMatrixGatherer())
    loader = torch.utils.data.DataLoader([{"input_ids": each} for each in calibration])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "q"
        clock, cpu = time.perf_counter(), time.process_time()
        more = {"num_calibration_samples": len(loader), "max_seq_length": calibration.shape[1]}
        if step.endswith("dynamic where needed"):
            more["uncalibratable"] = "dynamic"
        result = oneshot(model, recipe, loader, output, **more)
        found: dict[str, Any] = {
            "seconds": time.perf_counter() - clock,
            "cpu_seconds": time.process_time() - cpu,
            "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
            "unserved": [n.partition(":")[0] for n in result.notes if "no static scale" in n],
        }
        for key, ids in texts.items():
            size = {"num_samples": 1, "max_seq_length": ids.shape[1]}
            samples = [evaluate(model, output, [{"input_ids": each}], **size) for each in ids]
            each_kl = [each.kl_divergence for each in samples]
            kl, error = mean_and_error(each_kl)
            found[key] = {"kl": kl, "error": error, "samples": each_kl}
    return found


TASKS = {"row": row, "tokenize": tokenize}

run = functools.partial(asked, sys.executable, script=__file__)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default="-")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rows", nargs="*", default=ROWS)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        run("tokenize", options.model, options.text, "-", options.samples, tokens)
        for name in options.rows:
            results[name] = run("row", options.model, name, tokens)
            texts = {key: each for key, each in results[name].items() if isinstance(each, dict)}
            shown = "  ".join(f"{k} {v['kl']:.4f} ± {v['error']:.4f}" for k, v in texts.items())
            print(f"{name:40} {shown}  CPU {results[name]['cpu_seconds']:.0f} s", flush=True)
            if options.json:
                outcome = {
                    "model": options.model.name,
                    "samples": options.samples,
                    "machine": {"processor": processor()},
                    "versions": versions("torch", "transformers", "compressed-tensors"),
                    "results": {each: results[each] for each in ROWS if each in results},
                }
                options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
