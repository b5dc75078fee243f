"""Sums that do not depend on the order in which their terms are added.

Floating-point addition rounds, so two ranks that add the same numbers in another order end with
another sum. Here a number is first cut into pieces, each a multiple of a unit of its own, and the
pieces are added apart. A float64 holds such a sum without rounding, so any order gives the same
bits: over batches, over ranks, over files.

    bins: (4, n) float64; bin k holds multiples of UNITS[k]

A bin holds numbers below 2^40 of its unit; larger ones are carried to the bin above.
"""

from __future__ import annotations

import torch

__all__ = ["add_exactly", "carried", "empty_bins", "total"]

UNITS = tuple(2.0**power for power in (20, -20, -60, -100))
_CARRY = 2.0**40  # from one unit to the next


def empty_bins(size: int, device: torch.device | str = "cpu") -> torch.Tensor:
    return torch.zeros(len(UNITS), size, dtype=torch.float64, device=device)


def add_exactly(bins: torch.Tensor, values: torch.Tensor) -> None:
    """Add numbers, (n,), in place; those below 2^-100 are dropped, those above 2^73 may round.

    Call `carried` before a bin has taken more than some thousand of them.
    """
    rest = values.to(torch.float64)
    for position, unit in enumerate(UNITS):
        piece = (rest / unit).floor_().mul_(unit)
        bins[position] += piece
        rest = rest - piece


def carried(bins: torch.Tensor) -> torch.Tensor:
    """Return the same sums with every bin but the first from 0 to one unit of the bin above it.

    There is one such form of a number, whatever it was added up from.
    """
    bins = bins.clone()
    for position in range(len(UNITS) - 1, 0, -1):
        above = UNITS[position] * _CARRY
        over = (bins[position] / above).floor_().mul_(above)
        bins[position] -= over
        bins[position - 1] += over
    return bins


def total(bins: torch.Tensor) -> torch.Tensor:
    """Return the sums, (n,) float64, rounded in one way for one exact value."""
    result = torch.zeros_like(bins[0])
    for each in carried(bins).flip(0):
        result += each
    return result
