"""Observers for static activations: what a model loses by their ranges, and the time they take.

Weights are rounded to 8 bits once. Inputs of all Linear layers but the head are quantized with one
static scale each; all observers calibrate in one pass over the unquantized model, in the type that
serves it. KL divergence is that from the original model, in fp32, with inputs reconstructed by
compressed-tensors' own function.

    python benchmarks/activations.py quality MODEL [--text FILE] [--json FILE]
    python benchmarks/activations.py speed [--json FILE]      # beside torch.ao's HistogramObserver
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from rounding import EVALUATED, _divergence, _load, _log_probabilities, tokenize
from whole_run import processor, versions

from steelyard import Observer

SAMPLES = 16

SCHEMES: dict[str, dict[str, Any]] = {
    "W8A8": {"num_bits": 8, "type": "int"},
    "FP8": {"num_bits": 8, "type": "float"},
}
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "minmax": ("minmax", {}),
    "static_minmax": ("static_minmax", {}),
    "percentile 99.99": ("percentile", {}),
    "percentile 99.999": ("percentile", {"percentile": 99.999}),
    "entropy": ("entropy", {}),
    "histogram_mse": ("histogram_mse", {}),
    "histogram_mse, norm 1": ("histogram_mse", {"norm": 1.0}),
    "histogram_mse, norm 3": ("histogram_mse", {"norm": 3.0}),
}


# ---- quality ----


@torch.no_grad()
def calibrated(model: Any, layers: dict[str, Any], ids: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return the parameters of each row, scheme and layer, of one pass over the tokens."""
    observers: dict[str, dict[str, Observer]] = {name: {} for name in layers}
    for each in observers.values():
        for scheme, kind in SCHEMES.items():
            for row, (name, options) in ROWS.items():
                args = QuantizationArgs(strategy="tensor", observer_kwargs=options, **kind)
                each[f"{scheme} {row}"] = Observer.load_from_registry(
                    name, base_name="input", args=args
                )

    def seen(name: str) -> Any:
        def hook(_: Any, given: tuple[torch.Tensor, ...]) -> None:
            for observer in observers[name].values():
                observer(given[0].to(torch.bfloat16))

        return hook

    hooks = [layer.register_forward_pre_hook(seen(name)) for name, layer in layers.items()]
    for row in ids:
        model(row.unsqueeze(0))
    for hook in hooks:
        hook.remove()
    found: dict[str, dict[str, Any]] = {}
    for name, each in observers.items():
        for key, observer in each.items():
            found.setdefault(key, {})[name] = observer.get_qparams()["scale"].float()
    return found


@torch.no_grad()
def round_weights(layers: dict[str, Any], kind: dict[str, Any]) -> None:
    args = QuantizationArgs(strategy="channel", **kind)
    for layer in layers.values():
        weight = layer.weight.data
        observer = Observer.load_from_registry("optimal", base_name="weight", args=args)
        scale, zero_point = observer(weight.to(torch.bfloat16))
        weight.copy_(fake_quantize(weight, scale.float(), zero_point, args))


def quantized(scale: torch.Tensor, args: QuantizationArgs) -> Any:
    def hook(_: Any, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor]:
        return (fake_quantize(given[0], scale, torch.zeros_like(scale), args),)

    return hook


def quality(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        tokenize(str(options.model), options.text, "-", str(SAMPLES), str(tokens))
        parts = [torch.tensor(rows) for rows in json.loads(tokens.read_text()).values()]
    calibration, evaluation = parts
    model = _load(str(options.model))
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    before = _log_probabilities(model, evaluation)
    scales = calibrated(model, layers, calibration)
    weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    results = []
    for scheme, kind in ((name, SCHEMES[name]) for name in options.schemes):
        for name, layer in layers.items():
            layer.weight.data.copy_(weights[name])
        round_weights(layers, kind)
        args = QuantizationArgs(strategy="tensor", **kind)
        for row in (*options.rows, "not quantized"):
            chosen = scales.get(f"{scheme} {row}")
            hooks = []
            for name, layer in layers.items() if chosen else ():
                hooks.append(layer.register_forward_pre_hook(quantized(chosen[name], args)))
            found = _divergence(before, _log_probabilities(model, evaluation))
            for hook in hooks:
                hook.remove()
            results.append({"scheme": scheme, "row": row, **found})
            print(f"{scheme:5} {row:18} KL {found['kl']:.4f} ± {found['error']:.4f}", flush=True)
            if options.json:
                _write(options.json, options, calibration, evaluation, results)
    return {}


def _write(path: Path, options: Any, calibration: Any, evaluation: Any, results: Any) -> None:
    outcome = {
        "model": options.model.name,
        "calibration": f"{len(calibration)} x {calibration.shape[1]} tokens",
        "evaluation": f"{EVALUATED} x {evaluation.shape[1]} tokens",
        "versions": versions("torch", "transformers", "compressed-tensors"),
        "results": results,
    }
    path.write_text(json.dumps(outcome, indent=1) + "\n")


# ---- speed ----


def speed(options: argparse.Namespace) -> dict[str, Any]:
    from torch.ao.quantization.observer import HistogramObserver

    torch.set_num_threads(1)
    batches = [
        torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    ]
    batches[1][0, 3, 5] = 40.0  # the range grows
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    sides = {
        "torch.ao HistogramObserver": HistogramObserver,
        "histogram_mse": lambda: Observer.load_from_registry(
            "histogram_mse", base_name="input", args=args
        ),
        "static_minmax": lambda: Observer.load_from_registry(
            "static_minmax", base_name="input", args=args
        ),
    }
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        values = [each.to(dtype) for each in batches]
        least = dict.fromkeys(sides, float("inf"))
        solve = dict.fromkeys(sides, float("inf"))
        for _ in range(options.runs):
            for side, build in sides.items():  # alternating
                observer = build()
                start = time.process_time()
                for value in values:
                    observer(value)
                taken = time.process_time() - start
                least[side] = min(least[side], taken / sum(v.numel() for v in values))
                start = time.process_time()
                (observer.calculate_qparams if "torch.ao" in side else observer.get_qparams)()
                solve[side] = min(solve[side], time.process_time() - start)
        for side in sides:
            row = {"dtype": str(dtype).removeprefix("torch."), "side": side}
            row |= {"ns": 1e9 * least[side], "solve_ms": 1e3 * solve[side]}
            results.append(row)
            print(f"{row['dtype']:9} {side:28} {row['ns']:6.2f} ns, {row['solve_ms']:7.1f} ms")
    outcome = {"processor": processor(), "versions": versions("torch"), "results": results}
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["quality", "speed"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", default="-", help="else what the model itself writes")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    {"quality": quality, "speed": speed}[options.what](options)


if __name__ == "__main__":
    main()
