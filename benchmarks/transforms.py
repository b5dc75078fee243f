"""What transforms that fold into the weights are worth, beside the same scheme without them.

Each row is a process of its own that quantizes MODEL with the same calibration tokens. The written
checkpoint is compared with the original as it would be served, inputs rounded too: KL divergence on
held-out text, with its standard error over samples.

    python benchmarks/transforms.py MODEL --text FILE [--samples 16] [--rows NAME ...] [--json FILE]
                                    [--peer-python PYTHON]

Rows that FILE has already are kept, so rows can be measured one after another; each has the digest
of its tokens. PYTHON, of an environment with llm-compressor, runs the rows that name it; their
checkpoints are compared alike.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import resource
import shutil
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
    "W4A16 group 128": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 128}},
    "W4A16 group 64": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 64}},
    "W4A16 group 32": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}},
    "NVFP4": "NVFP4",
    "MXFP4": "MXFP4",
}
AS_ASKED = {"held_out_check": False}
ONLY_R2 = {"rotations": ["R2"], **AS_ASKED}
WITH_R4 = {"rotations": ["R1", "R2", "R4"], "transform_type": "random-hadamard", **AS_ASKED}
STEPS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "no transform": [],
    "SmoothQuant 0.5": [("SmoothQuantModifier", {})],
    "SmoothQuant 0.8": [("SmoothQuantModifier", {"smoothing_strength": 0.8})],
    "AWQ": [("AWQModifier", {})],
    "auto": [("TransformModifier", {})],
    "dynamic where needed": [],
    "auto, dynamic where needed": [("TransformModifier", {})],
    "SpinQuant": [("SpinQuantModifier", {}), ("IMatrixGatherer", {})],
    "SpinQuant unchecked": [("SpinQuantModifier", AS_ASKED), ("IMatrixGatherer", {})],
    "SpinQuant R2": [("SpinQuantModifier", ONLY_R2), ("IMatrixGatherer", {})],
    "SpinQuant with R4": [("SpinQuantModifier", WITH_R4), ("IMatrixGatherer", {})],
    "GPTQ": [],
    "SmoothQuant 0.8, GPTQ": [("SmoothQuantModifier", {"smoothing_strength": 0.8})],
    "SpinQuant, GPTQ": [("SpinQuantModifier", {})],
    "SpinQuant unchecked, GPTQ": [("SpinQuantModifier", AS_ASKED)],
    "SpinQuant random-hadamard, GPTQ": [
        ("SpinQuantModifier", {"transform_type": "random-hadamard", **AS_ASKED})
    ],
    "SpinQuant random-matrix, GPTQ": [
        ("SpinQuantModifier", {"transform_type": "random-matrix", **AS_ASKED})
    ],
    "SpinQuant R2, GPTQ": [("SpinQuantModifier", ONLY_R2)],
    "AWQ, GPTQ": [("AWQModifier", {})],
    "auto, GPTQ": [("TransformModifier", {})],
}
PEER = "llm-compressor's "
PEER_STEPS = ("AWQ", "SmoothQuant 0.8, GPTQ", "SpinQuant")
ROWS = [
    f"{scheme}: {step}"
    for scheme in SCHEMES
    for step in (*STEPS, *(PEER + step for step in PEER_STEPS))
]


# ---- in a process of its own ----


def row(model: str, name: str, tokens: str, peer_python: str) -> dict[str, Any]:
    """Quantize, and compare with the original; in our environment."""
    import torch

    from steelyard.evaluate import evaluate

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "q"
        if PEER in name:
            found = asked(peer_python, "peer", model, name, tokens, output, script=__file__)
            shutil.copy(Path(model, "tokenizer.json"), output)  # Gemma's loses a token when saved
        else:
            found = quantized(model, name, tokens, output)
        texts = json.loads(Path(tokens).read_text())
        for key in (key for key in texts if key != "calibration"):
            ids = torch.tensor(texts[key])
            size = {"num_samples": len(ids), "max_seq_length": ids.shape[1]}
            scored: list[Any] = []
            evaluate(model, output, [{"input_ids": e} for e in ids], then=scored.append, **size)
            tokens_kl = torch.cat([each.divergence for each in scored[0].scores])
            each_kl = tokens_kl.double().reshape(len(ids), -1).mean(1).tolist()
            kl, error = mean_and_error(each_kl)
            found[key] = {"kl": kl, "error": error, "samples": each_kl}
    return found


def calibrating(tokens: str) -> tuple[Any, dict[str, int]]:
    """Return a loader of the calibration samples, and their number and length."""
    import torch

    ids = torch.tensor(json.loads(Path(tokens).read_text())["calibration"])
    loader = torch.utils.data.DataLoader([{"input_ids": each} for each in ids])
    return loader, {"num_calibration_samples": len(ids), "max_seq_length": ids.shape[1]}


def figures(clock: float, cpu: float) -> dict[str, Any]:
    return {
        "seconds": time.perf_counter() - clock,
        "cpu_seconds": time.process_time() - cpu,
        "peak_bytes": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
    }


def peer(model: str, name: str, tokens: str, output: str) -> dict[str, Any]:
    """Quantize with llm-compressor, in its environment."""
    from llmcompressor import oneshot
    from llmcompressor.modifiers.awq import AWQModifier
    from llmcompressor.modifiers.gptq import GPTQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.modifiers.transform import SpinQuantModifier
    from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    IntermediatesCache.pin_memory = lambda *_: None  # AWQ pins memory: needs an accelerator
    scheme, _, step = name.partition(f": {PEER}")
    groups = {"group_0": {"targets": ["Linear"], **SCHEMES[scheme]}}
    last: dict[str, Any] = {"config_groups": groups, "ignore": ["lm_head"]}
    smoothing = [["re:.*q_proj", "re:.*k_proj", "re:.*v_proj"], "re:.*input_layernorm"]
    before = "pre_feedforward" if "gemma" in Path(model).name else "post_attention"
    second = [["re:.*gate_proj", "re:.*up_proj"], f"re:.*{before}_layernorm"]
    recipes: dict[str, Any] = {
        "AWQ": lambda: [AWQModifier(**last)],
        "SmoothQuant 0.8, GPTQ": lambda: [
            SmoothQuantModifier(smoothing_strength=0.8, mappings=[smoothing, second]),
            GPTQModifier(**last),
        ],
        "SpinQuant": lambda: [
            SpinQuantModifier(rotations=["R1", "R2"], transform_type="random-hadamard"),
            QuantizationModifier(**last),
        ],
    }
    loader, size = calibrating(tokens)
    clock, cpu = time.perf_counter(), time.process_time()
    oneshot(model=model, dataset=loader, recipe=recipes[step](), output_dir=output, **size)
    return figures(clock, cpu)


def quantized(model: str, name: str, tokens: str, output: Path) -> dict[str, Any]:
    from steelyard import modifiers, oneshot

    loader, more = calibrating(tokens)  # and options of `oneshot`
    scheme, _, step = name.partition(": ")
    recipe: list[Any] = [getattr(modifiers, kind)(**given) for kind, given in STEPS[step]]
    last = modifiers.GPTQModifier if "GPTQ" in step else modifiers.QuantizationModifier
    given: Any = {"scheme": scheme}
    if scheme != SCHEMES[scheme]:  # no preset
        given = {"config_groups": {"group_0": {"targets": ["Linear"], **SCHEMES[scheme]}}}
    recipe.append(last(**given, ignore=["lm_head"]))
    if not STEPS[step] and "GPTQ" not in step:  # weights are weighted by importance in all rows
        recipe.insert(0, modifiers.IMatrixGatherer())
    if step.endswith("dynamic where needed"):
        more["uncalibratable"] = "dynamic"
    clock, cpu = time.perf_counter(), time.process_time()
    result = oneshot(model, recipe, loader, output, **more)
    unserved = [note.partition(":")[0] for note in result.notes if "no static scale" in note]
    compared = [note for note in result.notes if note.startswith("SpinQuantModifier: ")]
    return {**figures(clock, cpu), "unserved": unserved, "compared": compared}


TASKS = {"row": row, "peer": peer, "tokenize": tokenize}

run = functools.partial(asked, sys.executable, script=__file__)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default="-")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--rows", nargs="*", default=[each for each in ROWS if PEER not in each])
    parser.add_argument("--peer-python", default=sys.executable)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if options.json and options.json.exists():
        results = json.loads(options.json.read_text())["results"]
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        run("tokenize", options.model, options.text, "-", options.samples, tokens)
        digest = hashlib.sha256(tokens.read_bytes()).hexdigest()[:16]
        for name in options.rows:
            results[name] = run("row", options.model, name, tokens, options.peer_python)
            results[name]["tokens"] = digest
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
