"""What a histogram loses when it is quantized with given parameters: error, divergence.

Values are taken as spread evenly over their bin. Lengths are counted in bins: u is the stored scale
over the bins' width, so that the edge e of a bin has the code e / u + zero_point before rounding.

The error, a sum of |x - reconstructed x| ^ norm, needs no sum over values. With A the
antiderivative of a code's error,

    error of a bin = u^(norm + 1) * count * (A(code of its upper edge) - A(code of its lower edge))

The divergence is that of entropy calibration: P is the histogram with the counts beyond the range
moved to its outermost bins; Q has, for each code, the counts within the range spread evenly over
the bins of that code that P fills; the cost is the KL divergence of Q from P.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels import compiled_costs
from steelyard.kernels.backend import use_compiled
from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.rounding import minifloat, quantized_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["divergences", "errors_of"]

_HALF = BINS // 2


def errors_of(
    counts: torch.Tensor,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    norm: float = 2.0,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the sum of errors ^ norm of each candidate, with errors in bins.

    counts:           (num_qparams, BINS) int64
    unit, zero_point: (num_qparams, num_candidates) fp64
    returns:          as unit; the largest number where the compiled kernel stopped, since the error
                      was above that of an earlier candidate
    """
    if use_compiled(torch.empty(0), backend):
        return compiled_costs.errors_of(counts, unit, zero_point, args, norm)
    costs = torch.empty_like(unit)
    low, high = quantized_range(args)
    for row, (count, u, z) in enumerate(zip(counts, unit, zero_point, strict=True)):
        places = count.nonzero().flatten()
        edges = torch.stack([places - _HALF, places - _HALF + 1]).double()
        code = edges.unsqueeze(-1) / u + z  # (2, bins, candidates)
        inside = code.clamp(low, high)
        area = _antiderivative(inside, args, norm) + _power(code - inside, norm)
        costs[row] = ((area[1] - area[0]) * count[places, None]).sum(0) * u ** (norm + 1)
    return costs


def divergences(
    counts: torch.Tensor,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    ends: torch.Tensor,
    args: QuantizationArgs,
    backend: str | None = None,
) -> torch.Tensor:
    """Return the KL divergence that each candidate causes; the largest number where it has no end.

    ends: (2, num_qparams, num_candidates) int64, the edges between which bins are in the range,
          counted from zero: -BINS / 2 to BINS / 2
    """
    if use_compiled(torch.empty(0), backend):
        return compiled_costs.divergences(counts, unit, zero_point, ends, args)
    costs = torch.empty_like(unit)
    for row, count in enumerate(counts):
        for i, (u, z) in enumerate(zip(unit[row], zero_point[row], strict=True)):
            first, last = (int(end) + _HALF for end in ends[:, row, i])
            costs[row, i] = _divergence(count, first, last, u, z, args)
    return costs


def _divergence(
    counts: torch.Tensor,
    first: int,
    last: int,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
) -> float:
    inside = counts[first:last].double()
    clipped = inside.clone()
    clipped[0] += counts[:first].sum()
    clipped[-1] += counts[last:].sum()
    filled = clipped > 0
    centers = torch.arange(first - _HALF, last - _HALF, dtype=torch.float64)[filled] + 0.5
    code = (centers / unit + zero_point).clamp(*quantized_range(args))
    _, segment = torch.unique_consecutive(_rounded(code, args), return_inverse=True)
    p, q = clipped[filled], inside[filled]
    mass = torch.zeros_like(p).scatter_add_(0, segment, q)
    bins = torch.zeros_like(p).scatter_add_(0, segment, torch.ones_like(p))
    spread = (mass / bins)[segment]
    if not bool((spread > 0).all()):
        return torch.finfo(torch.float64).max
    return float((p / p.sum() * torch.log((p / p.sum()) / (spread / q.sum()))).sum())


def _antiderivative(code: torch.Tensor, args: QuantizationArgs, norm: float) -> torch.Tensor:
    """Integrate the error of rounded codes from 0 to `code`."""
    if args.type == "int":
        return _area(code, norm)
    mantissa, smallest = minifloat(args.num_bits)
    step = _step(code, args)
    # what lies below a power of two: twice as many steps below the first, of the smallest size
    octave = torch.arange(64, dtype=torch.float64)
    areas = 2.0**mantissa * _cell(norm) * torch.exp2((norm + 1) * (octave + smallest - mantissa))
    areas[0] *= 2
    below = torch.cumsum(areas, 0) - areas
    index = (torch.log2(step) + mantissa - smallest).round().long()
    starts = torch.where(index > 0, areas[index], 0)
    within = step ** (norm + 1) * _area(code.abs() / step, norm)
    return torch.sign(code) * (within - starts + below[index])


def _area(scaled: torch.Tensor, norm: float) -> torch.Tensor:
    whole = torch.round(scaled)
    return whole * _cell(norm) + _power(scaled - whole, norm)


def _cell(norm: float) -> float:
    """Return the integral of |error| ^ norm over the values of one code."""
    return float(2 * 0.5 ** (norm + 1) / (norm + 1))


def _power(distance: torch.Tensor, norm: float) -> torch.Tensor:
    """Integrate |x| ^ norm from 0 to `distance`."""
    return torch.sign(distance) * distance.abs() ** (norm + 1) / (norm + 1)


def _rounded(code: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    if args.type == "int":
        return torch.round(code)
    step = _step(code, args)
    return torch.round(code / step) * step


def _step(code: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the distance of neighbouring codes."""
    mantissa, smallest = minifloat(args.num_bits)
    exponent = (torch.frexp(code).exponent - 1).clamp(min=smallest)
    return torch.ldexp(torch.ones_like(code), exponent - mantissa)
