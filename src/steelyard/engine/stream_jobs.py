"""The jobs of a stream: tensors that are read, quantized and written together, by shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from steelyard.checkpoint import CheckpointView
from steelyard.checkpoint.shard_file import HEADER_ROOM, entry_bytes
from steelyard.fusion import solved_together
from steelyard.plan.plan import Plan, Planned, search_time

__all__ = ["Job", "budget_of", "jobs_of", "shards_of"]

_LEAST = 128 << 20  # bytes in flight, even if all tensors are small
_SHARDS = 16  # per checkpoint, so that as many ranks can write;
_LEAST_SHARD = 64 << 20  # fewer if they would be smaller than this, in bytes
_HEADER = 64  # bytes of a header without its entries


@dataclass(frozen=True)
class Job:
    """Tensors that are read, quantized and written together.

    names:   tensors of the source
    modules: the modules whose weights they are, if quantized; empty if only copied
    """

    names: tuple[str, ...]
    modules: tuple[Planned, ...] = ()

    def nbytes(self, view: CheckpointView) -> int:
        return sum(view.info(name).nbytes for name in self.names)

    def stored(self, view: CheckpointView) -> tuple[int, int]:
        """Return the bytes it writes, and an upper bound of its bytes in the header."""
        if not self.modules:
            infos = [(name, view.info(name)) for name in self.names]
            return self.nbytes(view), sum(entry_bytes(n, len(i.shape)) for n, i in infos)
        nbytes, header = 0, 0
        for planned in self.modules:
            nbytes += planned.stored_bytes
            for leaf in planned.tensors:
                header += entry_bytes(f"{planned.name}.{leaf}", 2)
        return nbytes, header

    def cost(self, view: CheckpointView) -> float:
        """Estimate the seconds that one thread needs."""
        return self.nbytes(view) / 1e9 + sum(search_time(planned) for planned in self.modules)


def jobs_of(view: CheckpointView, plan: Plan) -> list[Job]:
    """Return all jobs in the order of the files; layers that share a scale are one job."""
    planned = {p.name: p for p in plan.quantized if p.scheme.weights is not None}
    together = solved_together({name: p.scheme for name, p in planned.items()})
    jobs: list[Job] = []
    taken: set[str] = set()
    for tensor in view.names():
        name = tensor.removesuffix(".weight")
        if name == tensor or name not in planned:
            jobs.append(Job((tensor,)))
        elif name not in taken:
            names = together[name]
            taken.update(names)
            jobs.append(Job(tuple(f"{n}.weight" for n in names), tuple(planned[n] for n in names)))
    return jobs


def shards_of(view: CheckpointView, jobs: Sequence[Job], at_most: int) -> list[list[Job]]:
    """Return the jobs of each shard, in order: about 16 shards of equal size, fewer if small.

    at_most: largest shard in bytes, unless one job is larger
    """
    sizes = [job.stored(view) for job in jobs]
    room = min(max(sum(size for size, _ in sizes) // _SHARDS, _LEAST_SHARD), at_most)
    shards: list[list[Job]] = []
    nbytes, header = 0, _HEADER
    for job, (size, entries) in zip(jobs, sizes, strict=True):
        if not shards or nbytes + size > room or header + entries > HEADER_ROOM:
            shards.append([])
            nbytes, header = 0, _HEADER
        shards[-1].append(job)
        nbytes += size
        header += entries
    return shards


def budget_of(view: CheckpointView, jobs: Sequence[Job]) -> int:
    """Return how many bytes of the source may be in flight."""
    return max(_LEAST, 2 * max((j.nbytes(view) for j in jobs if j.modules), default=0))
