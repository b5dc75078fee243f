"""Figures of one module for the report, computed while its tensors are in memory.

They cover a sample: at most `SAMPLE` weights, in short runs spread over the whole matrix. A run is
within one group, so it has one scale. The sample has the same weights before and after
quantization, and all of a matrix that is no larger.

    {"sampled": 16384, "clipped": 0.0004,
     "weight": {"low": -0.11, "high": 0.12, "before": [...], "after": [...]},
     "scale": {"count": 131072, "negative": 0, "min": 2e-4, "median": 6e-3, "max": 0.02,
               "low": -3.7, "high": -1.7, "counts": [...]},
     "activations": {"input_scale": [0.012, 0.012]}}

The histograms have equal bins from `low` to `high`, the scale's over its decimal logarithm. All
values have JSON's types, since a run that resumes reads them from its journal.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs
from torch.nn import Module

from steelyard.formats.tensor_names import (
    GLOBAL_SCALE,
    GROUP_INDEX,
    SCALE,
    WEIGHT,
    ZERO_POINT,
    base_of,
    is_scale,
)
from steelyard.kernels.pack import stored_values
from steelyard.kernels.rounding import minifloat, quantized_range
from steelyard.kernels.scale_blocks import block_of, blocks_in

__all__ = ["BINS", "SAMPLE", "SCALE_BINS", "figures_of", "module_figures", "with_figures"]

SAMPLE = 1 << 14  # weights
BINS, SCALE_BINS = 49, 24  # odd: in a symmetric range, zero lies inside a bin
_RUN = 64  # neighbouring weights
_GOLDEN = (math.sqrt(5) - 1) / 2


def figures_of(
    weight: torch.Tensor,
    qparams: Mapping[str, torch.Tensor],
    args: QuantizationArgs,
    after: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the figures of a quantized weight.

    weight:  (out, in), the original
    qparams: `weight_scale`, `weight_zero_point`, `weight_global_scale`, `weight_g_idx`
    after:   (out, in), the rounded weight; None if each is rounded to nearest
    """
    rows, columns = weight.shape
    scale, groups = qparams[SCALE], qparams.get(GROUP_INDEX)
    # a global scale counts only in formats that store one
    global_scale = qparams.get(GLOBAL_SCALE) if args.strategy == "tensor_group" else None
    height, width = block_of(args, rows, columns)
    run = 1 if groups is not None else math.gcd(columns, width, _RUN)
    row, column, of_run = _places(rows, columns, run, height, width, weight.device)
    if groups is not None:
        of_run = row // height * blocks_in(columns, width) + groups[column[:, 0]].long()

    places = (row[:, None], column)
    before = weight[places]  # (runs, run)
    scales = scale.reshape(-1)[of_run][:, None]
    zeros = None if args.symmetric else qparams[ZERO_POINT].reshape(-1)[of_run][:, None]
    became = before if after is None else after[places]
    became = stored_values(became, scales, zeros, args, global_scale)
    return {
        "sampled": before.numel(),
        "clipped": _clipped(before, scales, zeros, args, global_scale),
        "weight": _weights(before.float(), became),
        "scale": _scales(scale, global_scale),
    }


def module_figures(module: Module, after: torch.Tensor | None = None) -> dict[str, Any]:
    """Return the figures of a module that has its quantization parameters."""
    scheme: Any = module.quantization_scheme
    found = {n: p.data for n, p in module._parameters.items() if p is not None}
    figures: dict[str, Any] = {}
    if scheme.weights is not None and WEIGHT in found and SCALE in found:
        figures = figures_of(found[WEIGHT], found, scheme.weights, after)
    activations = {
        name: [_short(float(end)) for end in value.float().aminmax()]
        for name, value in found.items()
        if is_scale(name) and base_of(name) != WEIGHT and value.numel()
    }
    return {**figures, "activations": activations} if activations else figures


def with_figures(details: dict[str, Any], figures: dict[str, Any]) -> dict[str, Any]:
    """Return the details of a module's result, with its figures if there are any."""
    return {**details, "figures": figures} if figures else details


@lru_cache(maxsize=8)  # a model has thousands of modules, but few shapes
def _places(
    rows: int, columns: int, run: int, height: int, width: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return row (runs,) and columns (runs, run) of the sample, and the block of each run."""
    first = _spread_out(rows * columns // run, SAMPLE // run, device) * run
    row, column = first // columns, first % columns
    block = row // height * blocks_in(columns, width) + column // width
    return row, column[:, None] + torch.arange(run, device=device), block


def _spread_out(count: int, wanted: int, device: torch.device) -> torch.Tensor:
    """Return at most `wanted` of `count` indices, one at a varying offset in each equal interval.

    A constant stride would hit the same columns in every row.
    """
    wanted = max(wanted, 1)
    if count <= wanted:
        return torch.arange(count, device=device)
    part = torch.arange(wanted, dtype=torch.float64)
    return ((part + part * _GOLDEN % 1) * (count / wanted)).long().to(device)


def _clipped(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
) -> float:
    """Return the fraction of weights beyond the range by more than half of the step at its end."""
    low, high = quantized_range(args)
    step = 1.0
    if args.type == "float":
        step = 2.0 ** (math.floor(math.log2(high)) - minifloat(args.num_bits)[0])
    scaled = weight.float() / _effective(scale, global_scale)
    if zero_point is not None:
        scaled = scaled + zero_point.float()
    outside = (scaled < low - step / 2) | (scaled > high + step / 2)
    return _short(int(outside.sum()) / max(outside.numel(), 1))


def _weights(before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    before, after = before.nan_to_num(), after.nan_to_num()  # codes times a scale may overflow
    ends = [float(end) for t in (before, after) for end in t.aminmax()]
    low, high = _range(min(ends), max(ends))
    return {
        "low": low,
        "high": high,
        "before": _histogram(before, BINS, low, high),
        "after": _histogram(after, BINS, low, high),
    }


def _scales(scale: torch.Tensor, global_scale: torch.Tensor | None) -> dict[str, Any]:
    every = scale.reshape(-1)
    low, high = (float(end) for end in every.float().aminmax())
    negative = int((every.float() < 0).sum()) if low < 0 else 0
    some = every
    if len(every) > SAMPLE:
        some = every[_spread_out(len(every), SAMPLE, every.device)]
    sizes = _effective(some, global_scale).abs()
    unit = 1.0 if global_scale is None else 1 / float(global_scale)
    smallest, largest = low * unit, high * unit
    if low < 0:
        smallest, largest = (float(end) * unit for end in every.float().abs().aminmax())
    logarithms = sizes.clamp_min(torch.finfo(torch.float32).tiny).log10()
    first, last = _range(*(float(end) for end in logarithms.aminmax()))
    return {
        "count": len(every),
        "negative": negative,
        "min": _short(smallest),
        "median": _short(float(sizes.median())),
        "max": _short(largest),
        "low": first,
        "high": last,
        "counts": _histogram(logarithms, SCALE_BINS, first, last),
    }


def _effective(scale: torch.Tensor, global_scale: torch.Tensor | None) -> torch.Tensor:
    return scale.float() if global_scale is None else scale.float() / global_scale.float()


def _range(low: float, high: float) -> tuple[float, float]:
    """Return a range of nonzero width, rounded to few digits, that still holds all values."""
    margin = max(high - low, abs(low), abs(high)) * 1e-5
    if high == low:
        margin = abs(low) * 0.1 or 1.0
    return _short(low - margin), _short(high + margin)


def _histogram(values: torch.Tensor, bins: int, low: float, high: float) -> list[int]:
    wide = max(-low, high) > torch.finfo(torch.float32).max / 4
    values = values.double() if wide else values.float()
    return [int(n) for n in torch.histc(values.cpu(), bins, low, high).tolist()]


def _short(value: float) -> float:
    return float(f"{value:.6g}")
