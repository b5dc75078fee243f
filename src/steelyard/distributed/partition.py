"""Who does what: pure functions, so that every rank finds the same answer without asking."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.kernels.partial_sums import LANES, lane_of

__all__ = ["deal", "lanes_of", "share"]


def deal(costs: Sequence[float], ranks: int) -> list[int]:
    """Return the rank of each piece of work: the dearest first, each to whom has least so far.

    >>> deal([5, 1, 4, 2], 2)
    [0, 0, 1, 1]
    """
    loads = [0.0] * ranks
    owners = [0] * len(costs)
    for piece in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        owner = min(range(ranks), key=lambda rank: (loads[rank], rank))
        owners[piece] = owner
        loads[owner] += costs[piece]
    return owners


def share(batches: int, rank: int, ranks: int) -> range:
    """Return which batches a rank takes: a run of whole lanes, in order, which may be empty.

    >>> [share(8, rank, 3) for rank in range(3)]
    [range(0, 3), range(3, 6), range(6, 8)]
    """
    mine = lanes_of(rank, ranks)
    taken = [batch for batch in range(batches) if lane_of(batch, batches) in mine]
    return range(taken[0], taken[-1] + 1) if taken else range(0)


def lanes_of(rank: int, ranks: int) -> range:
    """Return the lanes of a rank; the first one always has some."""
    return range(-(-rank * LANES // ranks), -(-(rank + 1) * LANES // ranks))
