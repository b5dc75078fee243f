"""Observers for static activations: what a model loses by their ranges, and the time they take.

Weights are rounded to 8 bits once. Inputs of all Linear layers but the head are quantized with one
static scale each; all observers calibrate in one pass over the unquantized model, in the type that
serves it. KL divergence is that from the original model, in fp32, with inputs reconstructed by
compressed-tensors' own function.

    python benchmarks/activations.py quality MODEL [--text FILE] [--json FILE]
    python benchmarks/activations.py speed [--json FILE]      # beside torch.ao's HistogramObserver

If nvidia-modelopt can be imported, its calibrators are timed, too.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from rounding import _load, _log_probabilities, tokenize
from whole_run import processor, versions

from steelyard import Observer

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
    "token_mse": ("token_mse", {}),
    "token_mse, relative 0": ("token_mse", {"relative": 0.0}),
    "token_mse, relative 0.5": ("token_mse", {"relative": 0.5}),
    "token_mse, relative 1": ("token_mse", {"relative": 1.0}),
}
NOT_QUANTIZED = "not quantized"  # weights alone are


# ---- quality ----


@torch.no_grad()
def calibrated(
    model: Any, layers: dict[str, Any], ids: torch.Tensor, schemes: list[str], rows: list[str]
) -> dict[str, dict[str, Any]]:
    """Return the scale of each scheme, row and layer, of one pass over the tokens."""
    observers: dict[str, dict[str, Observer]] = {name: {} for name in layers}
    for each in observers.values():
        for scheme in schemes:
            for row in rows:
                name, options = ROWS[row]
                args = QuantizationArgs(
                    strategy="tensor", observer_kwargs=options, **SCHEMES[scheme]
                )
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


class Reference:
    """The original model's distribution, kept in files: it may be larger than the model."""

    def __init__(self, model: Any, ids: torch.Tensor, folder: Path) -> None:
        self.model, self.ids, self.folder = model, ids, folder
        for i, each in enumerate(ids):
            torch.save(_log_probabilities(model, each.unsqueeze(0))[0], folder / f"{i}.pt")

    def divergence(self) -> dict[str, float]:
        """Return the mean KL divergence of the model as it is now, and its standard error."""
        means = []
        for i, each in enumerate(self.ids):
            before = [torch.load(self.folder / f"{i}.pt")]
            after = _log_probabilities(self.model, each.unsqueeze(0))
            means.append(_mean_divergence(before[0].float(), after[0].float()))
        mean = sum(means) / len(means)
        spread = math.sqrt(sum((each - mean) ** 2 for each in means) / (len(means) - 1))
        return {"kl": mean, "error": spread / math.sqrt(len(means))}


def _mean_divergence(p: torch.Tensor, q: torch.Tensor) -> float:
    parts = zip(p.split(64), q.split(64), strict=True)
    return sum(float((a.exp() * (a - b)).sum()) for a, b in parts) / len(p)


def quality(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokens = scratch / "tokens.json"
        tokenize(str(options.model), options.text, "-", str(options.samples), str(tokens))
        parts = [torch.tensor(rows) for rows in json.loads(tokens.read_text()).values()]
        judge(options, scratch, parts[0], parts[1][: options.evaluated])


@torch.no_grad()
def judge(
    options: argparse.Namespace, scratch: Path, calibration: torch.Tensor, evaluation: torch.Tensor
) -> None:
    model = _load(str(options.model))
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    reference = Reference(model, evaluation, scratch)
    scales = calibrated(model, layers, calibration, options.schemes, options.rows)
    weights = {name: layer.weight.detach().clone() for name, layer in layers.items()}
    for scheme in options.schemes:
        for name, layer in layers.items():
            layer.weight.data.copy_(weights[name])
        round_weights(layers, SCHEMES[scheme])
        args = QuantizationArgs(strategy="tensor", **SCHEMES[scheme])
        for row in (*options.rows, NOT_QUANTIZED):
            chosen = scales.get(f"{scheme} {row}", {})
            hooks = [
                layers[name].register_forward_pre_hook(quantized(scale, args))
                for name, scale in chosen.items()
            ]
            found = reference.divergence()
            for hook in hooks:
                hook.remove()
            print(f"{scheme:5} {row:22} KL {found['kl']:.4f} ± {found['error']:.4f}", flush=True)
            if options.json:
                sizes = calibration.shape, evaluation.shape
                _add(
                    options.json, options.model.name, sizes, {"scheme": scheme, "row": row, **found}
                )


def _add(path: Path, model: str, sizes: Any, result: dict[str, Any]) -> None:
    """Add a result to the file, in the place of an earlier one of the same scheme and row."""
    before = json.loads(path.read_text())["results"] if path.exists() else []
    key = result["scheme"], result["row"]
    results = [r for r in before if (r["scheme"], r["row"]) != key]
    calibration, evaluation = (f"{count} x {length} tokens" for count, length in sizes)
    outcome = {
        "model": model,
        "calibration": calibration,
        "evaluation": evaluation,
        "versions": versions("torch", "transformers", "compressed-tensors"),
        "results": [*results, result],
    }
    path.write_text(json.dumps(outcome, indent=1) + "\n")


# ---- speed ----


OURS = ("token_mse", "histogram_mse", "percentile", "entropy", "static_minmax")


def our_sides() -> dict[str, tuple[Any, Any, Any]]:
    """Return how to build an observer, to observe, and to choose its range."""
    from torch.ao.quantization.observer import HistogramObserver

    args = QuantizationArgs(num_bits=8, strategy="tensor")
    build = partial(Observer.load_from_registry, base_name="input", args=args)
    ours = {name: (partial(build, name), Observer.__call__, get_qparams) for name in OURS}
    theirs = HistogramObserver, HistogramObserver.__call__, HistogramObserver.calculate_qparams
    return {"torch.ao HistogramObserver": theirs, **modelopt_sides(), **ours}


def modelopt_sides() -> dict[str, tuple[Any, Any, Any]]:
    """Return the same for ModelOpt's calibrators; none without the package."""
    try:
        from modelopt.torch.quantization.calib import HistogramCalibrator, MaxCalibrator
    except ModuleNotFoundError:
        return {}
    sides: dict[str, tuple[Any, Any, Any]] = {
        f"ModelOpt histogram, {method}": (
            HistogramCalibrator,
            HistogramCalibrator.collect,
            partial(HistogramCalibrator.compute_amax, method=method),
        )
        for method in ("percentile", "entropy")
    }
    return {
        **sides,
        "ModelOpt max": (MaxCalibrator, MaxCalibrator.collect, MaxCalibrator.compute_amax),
    }


def get_qparams(observer: Any) -> Any:
    return observer.get_qparams()


def measured(sides: dict[str, tuple[Any, Any, Any]], runs: int) -> list[dict[str, Any]]:
    """Return the least times of each side, in CPU time; the sides alternate."""
    torch.set_num_threads(1)
    batches = [
        torch.randn(1, 512, 4096, generator=torch.Generator().manual_seed(i)) for i in (0, 1)
    ]
    batches[1][0, 3, 5] = 40.0  # the range grows
    results = []
    for dtype in (torch.float32, torch.bfloat16):
        values = [each.to(dtype) for each in batches]
        least = dict.fromkeys(sides, float("inf"))
        solve = dict.fromkeys(sides, float("inf"))
        for _ in range(runs):
            for side, (build, observe, choose) in sides.items():
                observer = build()
                start = time.process_time()
                for value in values:
                    observe(observer, value)
                taken = time.process_time() - start
                least[side] = min(least[side], taken / sum(v.numel() for v in values))
                start = time.process_time()
                choose(observer)
                solve[side] = min(solve[side], time.process_time() - start)
        for side in sides:
            row = {"dtype": str(dtype).removeprefix("torch."), "side": side}
            row |= {"ns": 1e9 * least[side], "solve_ms": 1e3 * solve[side]}
            results.append(row)
    return results


def speed(options: argparse.Namespace) -> dict[str, Any]:
    results = measured(our_sides(), options.runs)
    for row in results:
        print(f"{row['dtype']:9} {row['side']:28} {row['ns']:6.2f} ns, {row['solve_ms']:7.1f} ms")
    names = ["torch", *(["nvidia-modelopt"] if modelopt_sides() else [])]
    outcome = {"processor": processor(), "versions": versions(*names), "results": results}
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")
    return outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=["quality", "speed"])
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--text", default="-", help="else what the model itself writes")
    parser.add_argument("--samples", type=int, default=16, help="to calibrate with")
    parser.add_argument("--evaluated", type=int, default=8, help="samples to evaluate, at most 8")
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--schemes", nargs="*", default=list(SCHEMES))
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    {"quality": quality, "speed": speed}[options.what](options)


if __name__ == "__main__":
    main()
