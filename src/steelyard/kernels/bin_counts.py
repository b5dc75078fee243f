"""Counts of values in bins that every histogram shares.

A histogram has 2,048 bins of width 2^e, half of them on each side of zero:

    bin 1024 + m holds the x >= 0 with m = floor(x / 2^e), bin 1023 - m the x < 0 with |x| likewise

e is the least integer for which all values fit, but not below -116. Widths are powers of two and
zero is an edge, so doubling a width joins bins in pairs, and the bins of any two histograms
coincide after some doublings: counts stay exact integers, in whatever order values arrive and
histograms are joined. One tensor holds a histogram, so that it is joined, saved and sent as one.

    histogram: (*qparam_shape, 1 + BINS) int64, first e, then the counts
"""

from __future__ import annotations

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled, use_triton

__all__ = ["BINS", "SMALLEST_EXPONENT", "add_counts", "add_values", "joined"]

BINS = 2048
_HALF = BINS // 2
_BITS = _HALF.bit_length() - 1
SMALLEST_EXPONENT = -116  # 2^116 is an fp32 number; below 2^-106 magnitudes get no finer bins
_CHUNK = 1 << 20  # elements worked on at once by the reference


def add_values(
    histogram: torch.Tensor | None,
    observed: torch.Tensor,
    observed_range: tuple[torch.Tensor, torch.Tensor],
    group_dims: int = 1,
    backend: str | None = None,
) -> torch.Tensor:
    """Return a new histogram of the values of `histogram` and of `observed`.

    observed:       (num_observations, *qparam_shape, group_size), all finite
    observed_range: `range_of(observed)`
    group_dims:     2 where a group has rows and columns, (..., rows, columns)
    """
    absmax = torch.maximum(-observed_range[0], observed_range[1])
    exponent = _exponent_for(absmax)
    if histogram is None:
        added = torch.zeros(*exponent.shape, 1 + BINS, dtype=torch.int64, device=observed.device)
        added[..., 0] = exponent
    else:
        added = _widened(histogram, exponent)
    add_counts(observed, added, group_dims, backend)
    return added


def add_counts(
    observed: torch.Tensor,
    histogram: torch.Tensor,
    group_dims: int = 1,
    backend: str | None = None,
    rows: torch.Tensor | None = None,
) -> None:
    """Count values in place, in bins that hold all of them.

    rows: (count,) int64, the observations to count; all if None
    """
    if use_compiled(observed, backend):
        compiled.add_counts(observed, histogram, group_dims, rows)
        return
    observed = observed if rows is None else observed[rows]
    if use_triton(observed, backend):
        from steelyard.kernels import triton_histogram

        triton_histogram.add_counts(observed, histogram, group_dims)
    else:
        _add_counts(observed, histogram, group_dims)


def joined(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the histogram of the values of both."""
    result = _widened(first, second[..., 0])
    result[..., 1:] += _widened(second, first[..., 0])[..., 1:]
    return result


def _widened(histogram: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    """Return a copy with bins at least 2^exponent wide."""
    steps = (exponent.to(histogram) - histogram[..., 0]).clamp(min=0)
    if not bool(steps.any()):
        return histogram.clone()
    places = torch.arange(-_HALF, _HALF, device=histogram.device)
    # ~m >> 1 is ~(m >> 1): both sides of zero fold towards it
    targets = (places >> steps.clamp(max=_BITS + 1).unsqueeze(-1)) + _HALF
    result = torch.zeros_like(histogram)
    result[..., 0] = histogram[..., 0] + steps
    result[..., 1:].scatter_add_(-1, targets, histogram[..., 1:])
    return result


def _exponent_for(absmax: torch.Tensor) -> torch.Tensor:
    exponent = torch.frexp(absmax).exponent.long() - _BITS  # absmax < 2^(exponent + _BITS)
    return torch.where(absmax == 0, SMALLEST_EXPONENT, exponent.clamp(min=SMALLEST_EXPONENT))


def _power(exponent: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.ldexp(torch.ones_like(exponent, dtype=dtype), exponent)


def _add_counts(observed: torch.Tensor, histogram: torch.Tensor, group_dims: int) -> None:
    dtype = torch.float64 if observed.dtype == torch.float64 else torch.float32
    groups = histogram[..., 0].numel()
    values = observed.flatten(-group_dims).reshape(observed.shape[0], groups, -1)
    inverse = _power(-histogram[..., 0].reshape(1, -1, 1), dtype)
    first = (torch.arange(groups, device=observed.device) * BINS + _HALF).reshape(1, -1, 1)
    counts = torch.zeros(groups * BINS, dtype=torch.int64, device=observed.device)
    for part in torch.split(values, max(1, _CHUNK // values[0].numel())):
        x = part.to(dtype)
        place = (x.abs() * inverse).long()
        place = torch.where(x < 0, ~place, place) + first
        counts += torch.bincount(place.flatten(), minlength=len(counts))
    histogram[..., 1:] += counts.reshape(*histogram.shape[:-1], BINS)
