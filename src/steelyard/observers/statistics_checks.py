"""Checks of statistics from a file or another rank, against values that no observer computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from steelyard.errors import StatisticsError

if TYPE_CHECKING:
    from steelyard.observers.base import Observer

__all__ = ["check_statistics"]

_FLOATS = ("float16", "bfloat16", "float32", "float64")
_RANGES = (("min_vals", "max_vals"), ("min_vals_history", "max_vals_history"))
_NEVER_NEGATIVE = ("absmax", "absmax_history", "_imatrix_sum", "_imatrix_count")
_WHOLE = ("_imatrix_count",)


def check_statistics(
    observer: Observer,
    about: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    origin: str,
) -> None:
    """Reject negative counts, non-finite values, and ranges with a minimum above the maximum.

    observer: the one to hold them
    about:    its identity and counts
    origin:   the file
    """
    label = observer.label
    for name in ("updates", "tokens"):
        count = about.get(name)
        if type(count) is not int or count < 0:
            raise _wrong(origin, label, f"{name} is {count!r}, not a number of {name}")
    if about.get("dtype") not in (None, *_FLOATS):
        raise _wrong(origin, label, f"dtype is {about.get('dtype')!r}, not one of {_FLOATS}")
    for name, value in tensors.items():
        problem = _problem(name, value)
        if problem:
            raise _wrong(origin, label, f"{name} {problem}")
    if problem := observer.statistics_problem(tensors):
        raise _wrong(origin, label, problem)
    for low, high in _RANGES:
        if (low in tensors) != (high in tensors):
            present, absent = (low, high) if low in tensors else (high, low)
            raise _wrong(origin, label, f"it has {present} but no {absent}")
        if low in tensors and observer.args.strategy == "tensor":
            values = tensors[low][-1:] if low.endswith("_history") else tensors[low]
            if values.numel() != 1:
                shape = tuple(tensors[low].shape)
                raise _wrong(origin, label, f"{low} has shape {shape}, but the scale is one number")
        if low in tensors:
            _check_range(tensors[low], tensors[high], (low, high), label, origin)


def _problem(name: str, value: torch.Tensor) -> str | None:
    named = name in _NEVER_NEGATIVE or any(name in pair for pair in _RANGES)
    if named and value.is_floating_point() == (name in _WHOLE):
        return f"is of type {str(value.dtype).removeprefix('torch.')}"
    wide = value.to(torch.float64) if value.is_floating_point() else value
    if value.is_floating_point() and not bool(torch.isfinite(wide).all()):
        count = int((~torch.isfinite(wide)).sum())
        return f"holds NaN or infinity in {count} of {value.numel()} values"
    if name in _NEVER_NEGATIVE and bool((wide < 0).any()):
        return f"is below zero: {float(wide.min()):g}"
    return None


def _check_range(
    low: torch.Tensor, high: torch.Tensor, names: tuple[str, str], label: str, origin: str
) -> None:
    first, second = names
    if low.shape != high.shape:
        shapes = f"{tuple(low.shape)} and {tuple(high.shape)}"
        raise _wrong(origin, label, f"{first} and {second} have the shapes {shapes}")
    if bool((above := low > high).any()):
        found = f"{float(low[above][0]):g} is above {float(high[above][0]):g}"
        raise _wrong(origin, label, f"{first} exceeds {second}: {found}")


def _wrong(origin: str, label: str, problem: str) -> StatisticsError:
    return StatisticsError(f"{origin} is damaged: {label}: {problem}; observe the data again")
