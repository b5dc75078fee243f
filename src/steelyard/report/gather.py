"""Builds the sections of a report from the result of a run."""

from __future__ import annotations

import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import datetime, timezone
from importlib import metadata
from pathlib import Path
from platform import python_version
from typing import Any

from compressed_tensors.quantization import QuantizationArgs

from steelyard.algorithms import ModuleResult
from steelyard.checkpoint.shards import Shards
from steelyard.engine.block_names import BLOCK_ERROR, OUTPUT_ERROR, block_errors, block_of
from steelyard.engine.result import Result
from steelyard.evaluate.diagnosis import BlockCost
from steelyard.formats import format_of
from steelyard.formats.descriptions import describe_scales, scheme_label
from steelyard.formats.tensor_names import WEIGHT, is_parameter, stores_codes
from steelyard.names import WEIGHT_OBSERVER
from steelyard.plan.plan import Plan, Planned
from steelyard.report.sections import ModuleReport, SchemeUse, SkippedWeight, Summary, decibels

__all__ = [
    "blocks_of",
    "modules_of",
    "output_summary",
    "peak_memory",
    "skipped_weights",
    "summary_of",
]

_PACKAGES = ("steelyard", "torch", "compressed-tensors", "safetensors", "transformers")


def modules_of(result: Result) -> list[ModuleReport]:
    """Return the modules that a run quantized, in the order of the model."""
    planned = {p.name: p for p in result.plan.quantized}
    names = [n for n in (*planned, *result.plan.attention) if n in result.modules]
    stacks = Counter(_place(name)[0] for name in names if _place(name)[1] is not None)
    main = stacks.most_common(1)[0][0] if stacks else ""
    found = []
    for name in dict.fromkeys(names):
        stack, depth, expert, rest = _place(name)
        kind = rest if depth is None or stack == main else f"{stack}.*.{rest}"
        about = _weight_of(planned.get(name), result.modules[name])
        found.append(ModuleReport(name=name, kind=kind, depth=depth, expert=expert, **about))
    return found


def _weight_of(planned: Planned | None, module: ModuleResult) -> dict[str, Any]:
    details = {
        k: v for k, v in module.details.items() if k not in ("figures", OUTPUT_ERROR, BLOCK_ERROR)
    }
    output_error = module.details.get(OUTPUT_ERROR)
    about: dict[str, Any] = {
        "shape": None,
        "scheme": "attention states",
        "observer": None,
        "bytes_before": None,
        "bytes_after": None,
        "error": module.error,
        "snr": decibels(module.error),
        "output_error": output_error,
        "output_snr": decibels(output_error),
        "tokens": module.tokens,
        "details": details,
        **module.details.get("figures", {}),
    }
    if planned is not None:
        rows, columns = planned.shape
        weights = planned.scheme.weights
        about |= {
            "shape": [rows, columns],
            "scheme": scheme_label(planned.scheme),
            "observer": None if weights is None else weights.observer or WEIGHT_OBSERVER,
            "bytes_before": rows * columns * planned.dtype.itemsize,
            "bytes_after": planned.stored_bytes,
        }
    return about


def _place(name: str) -> tuple[str, int | None, int | None, str]:
    """Return a module's list of layers, layer index, expert index, and name within the layer.

    >>> _place("model.layers.3.mlp.experts.7.up_proj")
    ('model.layers', 3, 7, 'mlp.experts.*.up_proj')
    """
    parts = name.split(".")
    numbers = [i for i, part in enumerate(parts) if part.isascii() and part.isdigit()]
    if not numbers:
        return "", None, None, name
    first = numbers[0]
    expert = int(parts[numbers[1]]) if len(numbers) > 1 else None
    rest = ["*" if i in numbers else part for i, part in enumerate(parts)][first + 1 :]
    return ".".join(parts[:first]), int(parts[first]), expert, ".".join(rest) or "*"


def blocks_of(result: Result, modules: Sequence[ModuleReport]) -> list[BlockCost]:
    """Return the blocks whose output errors a run has measured, without what they would gain."""
    schemes: dict[str, dict[str, None]] = {}
    for module in modules:
        schemes.setdefault(block_of(module.name), {})[module.scheme] = None
    return [
        BlockCost(block, error, None, None, list(schemes[block]), [])
        for block, error in block_errors(result.modules).items()
        if block in schemes
    ]


def skipped_weights(result: Result) -> list[SkippedWeight]:
    return [
        SkippedWeight(name=left.name, shape=list(left.shape), bytes=left.nbytes, reason=left.reason)
        for left in result.plan.left
    ]


def summary_of(result: Result, modules: list[ModuleReport], folder: Path | None) -> Summary:
    """Return the totals of a run.

    folder: the checkpoint; without one, its size is taken from the plan
    """
    plan = result.plan
    weighed = [p for p in plan.quantized if p.scheme.weights is not None]
    weights = sum(p.shape[0] * p.shape[1] for p in weighed)
    stored = sum(p.stored_bytes for p in weighed)
    output_bytes, others = plan.output_bytes, None
    if folder is not None:
        output_bytes, others = _measured(folder)
    ratios = {m.name: m.snr for m in modules if m.snr is not None}
    worst = min(ratios, key=lambda name: ratios[name], default=None)
    return Summary(
        model=result.source,
        schemes=_schemes(plan),
        quantized=len(plan.quantized),
        left=len(plan.left),
        weights=weights,
        source_bytes=plan.source_bytes,
        output_bytes=output_bytes,
        bits_per_weight=round(8 * stored / weights, 4) if weights else None,
        bits_per_weight_overall=(
            None if others is None else round(8 * output_bytes / (weights + others), 4)
        ),
        median_snr=statistics.median(ratios.values()) if ratios else None,
        worst_snr=None if worst is None else ratios[worst],
        worst_module=worst,
        **output_summary(modules, "calibration"),
        tokens=max((m.tokens for m in modules), default=0),
        seconds=round(result.seconds, 3),
        peak_memory=peak_memory(),
        created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
        versions=_versions(),
    )


def output_summary(modules: Sequence[ModuleReport], data: str) -> dict[str, Any]:
    """Return the fields of a summary that follow from output errors.

    data: that they are for, calibration or held-out
    """
    ratios = {m.name: m.output_snr for m in modules if m.output_snr is not None}
    if not ratios:
        return {}
    worst = min(ratios, key=lambda name: ratios[name])
    return {
        "median_output_snr": statistics.median(ratios.values()),
        "worst_output_snr": ratios[worst],
        "worst_output_module": worst,
        "outputs_on": data,
    }


def _measured(folder: Path) -> tuple[int, int]:
    """Return the bytes of a checkpoint's tensors, and the number of unquantized elements."""
    with Shards(folder) as shards:
        infos = {name: shards.info(name) for name in shards}
    leaves: dict[str, set[str]] = {}
    for name in infos:
        module, _, leaf = name.rpartition(".")
        leaves.setdefault(module, set()).add(leaf)
    others = 0
    for name, info in infos.items():
        module, _, leaf = name.rpartition(".")
        codes = leaf == WEIGHT and stores_codes(leaves[module])
        if not codes and not is_parameter(leaf):
            others += math.prod(info.shape)
    return sum(info.nbytes for info in infos.values()), others


def _schemes(plan: Plan) -> list[SchemeUse]:
    uses: dict[str, list[Planned]] = {}
    for planned in plan.quantized:
        uses.setdefault(planned.group, []).append(planned)
    found = []
    for members in uses.values():
        scheme = members[0].scheme
        found.append(
            SchemeUse(
                label=scheme_label(scheme),
                format=format_of(scheme),
                weights=_words(scheme.weights, of_weights=True),
                inputs=_words(scheme.input_activations),
                outputs=_words(scheme.output_activations),
                modules=len(members),
            )
        )
    if plan.attention:
        cache = plan.config.kv_cache_scheme
        states = QuantizationArgs.model_validate(cache) if isinstance(cache, dict) else cache
        found.append(
            SchemeUse(
                label="attention states",
                format="scales",
                inputs=_words(states),
                modules=len(plan.attention),
            )
        )
    return found


def _words(args: QuantizationArgs | None, of_weights: bool = False) -> str | None:
    """Describe a type and the granularity of its scales."""
    if args is None:
        return None
    words = [describe_scales(args)]
    if of_weights:
        words.append(args.observer or WEIGHT_OBSERVER)
    elif args.dynamic:
        words.append("dynamic")
    return ", ".join(words)


def _versions() -> dict[str, str]:
    found = {"python": python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def peak_memory() -> int | None:
    """Return the peak memory of this process in bytes; None if the system does not report it."""
    try:
        import resource
    except ImportError:  # not on Windows
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
