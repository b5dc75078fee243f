"""What the ranks of a run must have in common, and the rows that each may have of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from steelyard.data.samples import Samples, join_samples
from steelyard.distributed import Ranks
from steelyard.engine.identity import digest_of
from steelyard.errors import DataError

__all__ = ["check_alike", "joined_over_ranks"]


def joined_over_ranks(samples: Samples, ranks: Ranks, batch_size: int) -> Samples:
    """Return the samples of all ranks in rank order, if each has its own; else those of this rank.

    Every rank then holds the same samples, as one process would that was given all of them.
    """
    digests = ranks.gather(digest_of(samples.batches))
    if len(set(digests)) == 1:
        return samples
    parts = ranks.gather(samples.rows)
    counts = ", ".join(str(len(part)) for part in parts)
    name = f"{ranks.count} ranks with data of their own ({counts} samples, joined in rank order)"
    return join_samples(parts, batch_size, f"{name}; rank {ranks.rank}: {samples.description}")


def check_alike(ranks: Ranks, mine: Mapping[str, Any]) -> None:
    """Raise if ranks were started with different options, recipes or data."""
    for rank, other in enumerate(ranks.gather(dict(mine))):
        for name in {**mine, **other}:
            if other.get(name) != mine.get(name):
                raise DataError(
                    f"ranks {rank} and {ranks.rank} have different {name}; all ranks must be "
                    "started with the same"
                )
