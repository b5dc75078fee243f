"""Partitions work over ranks: pure functions, so that every rank computes the same answer."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.kernels.partial_sums import PARTIAL_SUMS, partial_sum_of

__all__ = ["assign", "batches_of", "partial_sums_of"]


def assign(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each piece of work: largest first, each to the least loaded rank.

    >>> assign([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[piece] = owner
        loads[owner] += costs[piece]
    return owners


def batches_of(batches: int, rank: int, ranks: int) -> range:
    """Return the batches of a rank: those of its partial sums, which may be none.

    >>> [batches_of(8, rank, 3) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    mine = partial_sums_of(rank, ranks)
    taken = [batch for batch in range(batches) if partial_sum_of(batch, batches) in mine]
    return range(taken[0], taken[-1] + 1) if taken else range(0)


def partial_sums_of(rank: int, ranks: int) -> range:
    """Return the indices of a rank's partial sums; rank 0 always has some."""
    return range(-(-rank * PARTIAL_SUMS // ranks), -(-(rank + 1) * PARTIAL_SUMS // ranks))
