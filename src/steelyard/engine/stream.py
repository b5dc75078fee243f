"""Quantizes file by file: each tensor is read, quantized and written, without building a model.

Reading, computing and writing overlap: one thread reads ahead, one writes behind, and the kernels
between them use all cores. Tensors in flight never exceed a budget, so memory follows the largest
tensor and not the checkpoint.

The tensors of each shard are known beforehand, so each rank can write shards of its own. Within a
shard they are written in a fixed order, so a resumed run, or one with another number of ranks,
writes the same bytes.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from steelyard.algorithms import ModuleResult
from steelyard.checkpoint import CheckpointView, CheckpointWriter
from steelyard.checkpoint.figures import figures_of
from steelyard.checkpoint.finite import check_finite, finite_pieces
from steelyard.checkpoint.weight_errors import relative_error
from steelyard.distributed import assign
from steelyard.engine.progress import progress
from steelyard.engine.stream_jobs import Job, budget_of, jobs_of, shards_of
from steelyard.formats import stored_tensors
from steelyard.model.placement import CPU, Placement
from steelyard.names import WEIGHT_OBSERVER
from steelyard.observers import Observer
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.importance_file import Importance
from steelyard.plan.plan import Plan, Planned

__all__ = ["Stream", "quantize"]

_BUNDLE = 1 << 20  # bytes of small jobs per handover between threads, which costs 1 ms

Bundle = list[tuple[int, Job]]
"""Jobs that are read, computed and written together, each with its shard."""


@torch.no_grad()
def quantize(
    modules: Sequence[Planned], weights: Sequence[torch.Tensor], importance: Importance
) -> Iterator[tuple[dict[str, torch.Tensor], ModuleResult]]:
    """Yield the stored tensors of each weight, and its result."""
    observers = []
    for planned in modules:
        args = planned.scheme.weights
        assert args is not None
        name = args.observer or WEIGHT_OBSERVER
        observer = Observer.load_from_registry(name, base_name="weight", args=args)
        observer.module_name = planned.name
        if isinstance(observer, ImportanceObserver) and planned.name in importance:
            observer.add_importance(*importance[planned.name])
        observers.append(observer)
    Observer.fuse(observers)
    for observer, weight in zip(observers, weights, strict=True):
        observer(weight)
    for planned, observer, weight in zip(modules, observers, weights, strict=True):
        found: dict[str, Any] = dict(observer.get_qparams())
        qparams = {f"weight_{k}": v for k, v in found.items() if v is not None}
        errors = torch.empty(len(weight), dtype=torch.float64, device=weight.device)
        stored = stored_tensors(weight, qparams, planned.scheme, errors=errors)
        assert planned.scheme.weights is not None
        details = {"figures": figures_of(weight, qparams, planned.scheme.weights)}
        yield stored, ModuleResult(relative_error(float(errors.sum()), weight), 0, details)


class Stream:
    """One pass over a checkpoint, or over this rank's shards of it.

    modules:    result of each module, filled as they are done
    state:      returns the progress to record at a mark
    importance: from a file, for the modules whose observers use it
    placement:  the device that weights are quantized on
    """

    def __init__(
        self,
        view: CheckpointView,
        plan: Plan,
        writer: CheckpointWriter,
        modules: dict[str, ModuleResult],
        state: Callable[[], dict[str, Any]],
        importance: Importance | None = None,
        show: bool | None = None,
        placement: Placement | None = None,
    ) -> None:
        self.view = view
        self.writer = writer
        self.modules = modules
        self.state = state
        self.importance = importance or {}
        self.show = show
        self.placement = placement or Placement()
        jobs = jobs_of(view, plan)
        self.shards = shards_of(view, jobs, writer.max_shard_bytes)
        self.budget = budget_of(view, jobs)
        self.done: dict[int, int] = {}  # shard -> number of its finished jobs
        self.jobs: list[tuple[int, Job]] = []  # this rank's remaining jobs, and their shards
        self._shard = -1  # the one that is being written
        self._stopped = False  # no more writing
        self._mark_cost = 0.0  # seconds of the last mark; it lists all modules so far

    def run(self, done: dict[int, int]) -> None:
        """Do the remaining jobs; `done` counts those of each shard that an earlier run did."""
        self.done = done
        ranks, complete = self.writer.ranks, self.writer.is_complete
        left = [i for i in range(len(self.shards)) if not complete(i)]
        costs = [sum(job.cost(self.view) for job in self.shards[i]) for i in left]
        owners = assign(costs, ranks.count)
        mine = [i for i, owner in zip(left, owners, strict=True) if owner == ranks.rank]
        self.jobs = [(i, job) for i in mine for job in self.shards[i][done.get(i, 0) :]]
        total = sum(job.nbytes(self.view) for i in mine for job in self.shards[i])
        waiting = sum(job.nbytes(self.view) for _, job in self.jobs)
        reading, writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        with progress("quantizing", total, self.show, unit="bytes") as advance:
            advance(total - waiting)
            try:
                self._run(reading, writing, advance)
            except BaseException:
                self._stopped = True
                raise
            finally:
                for pool in (reading, writing):
                    pool.shutdown(cancel_futures=True)
        for i in mine:  # including those with all jobs done but not closed
            self.writer.at(i)
        self.writer.join()

    def _run(
        self,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
        advance: Callable[[int], None],
    ) -> None:
        bundles = list(self._bundles())
        ahead: deque[tuple[Bundle, int, Future[list[list[torch.Tensor]]]]] = deque()
        behind: deque[tuple[int, Future[None]]] = deque()
        waiting, on_the_way = 0, 0

        def finish_oldest() -> None:
            nonlocal on_the_way
            size, written = behind.popleft()
            written.result()
            on_the_way -= size
            advance(size)

        while waiting < len(bundles) or ahead:
            while waiting < len(bundles):
                bundle, size = bundles[waiting]
                if on_the_way and on_the_way + size > self.budget:
                    break
                on_the_way += size
                ahead.append((bundle, size, reading.submit(self._read_all, bundle)))
                waiting += 1
            if not ahead:  # everything in flight waits to be written
                finish_oldest()
                continue
            bundle, size, read = ahead.popleft()
            weights = read.result()
            stored = [
                self._quantized(job, each) if job.modules else []
                for (_, job), each in zip(bundle, weights, strict=True)
            ]
            behind.append((size, writing.submit(self._write_all, bundle, weights, stored)))
            del weights, stored, read
            while behind and (behind[0][1].done() or on_the_way > self.budget):
                finish_oldest()
        while behind:
            finish_oldest()

    def _quantized(
        self, job: Job, weights: list[torch.Tensor]
    ) -> list[tuple[dict[str, torch.Tensor], ModuleResult]]:
        """Quantize the weights of a job on the device, and bring the results back."""
        brought = [self.placement.bring(weight) for weight in weights]
        found = quantize(job.modules, brought, self.importance)
        return [({k: v.to(CPU) for k, v in tensors.items()}, done) for tensors, done in found]

    def _bundles(self) -> Iterator[tuple[Bundle, int]]:
        """Yield the jobs in order, small ones bundled, and the bytes that they read."""
        bundle: Bundle = []
        total = 0
        for shard, job in self.jobs:
            size = job.nbytes(self.view)
            if bundle and total + size > _BUNDLE:
                yield bundle, total
                bundle, total = [], 0
            bundle.append((shard, job))
            total += size
        if bundle:
            yield bundle, total

    def _read_all(self, bundle: Bundle) -> list[list[torch.Tensor]]:
        return [self._read(job) for _, job in bundle]

    def _write_all(
        self,
        bundle: Bundle,
        weights: list[list[torch.Tensor]],
        stored: list[list[tuple[dict[str, torch.Tensor], ModuleResult]]],
    ) -> None:
        for (shard, job), each, made in zip(bundle, weights, stored, strict=True):
            self._write(shard, job, each, made)

    def _read(self, job: Job) -> list[torch.Tensor]:
        """Return the tensors of a job; the writer reads large ones that are only copied."""
        if not job.modules and job.nbytes(self.view) > self.budget // 4:
            return []
        return [self.view.read(name) for name in job.names]

    def _write(
        self,
        shard: int,
        job: Job,
        weights: list[torch.Tensor],
        stored: list[tuple[dict[str, torch.Tensor], ModuleResult]],
    ) -> None:
        if self._stopped:  # a job before this one failed or was cancelled
            return
        try:
            self.writer.ranks.look()
            if shard != self._shard:
                self.writer.ranks.at(f"shard {shard + 1} of {len(self.shards)}")
                self._shard = shard
            self.writer.at(shard)
            self._put(job, weights, stored)
            self.done[shard] = self.done.get(shard, 0) + 1
            if self.writer.due(self._mark_cost):
                started = time.thread_time()  # does not count the wait for the disk
                self.writer.mark(self.state())
                self._mark_cost = time.thread_time() - started
        except BaseException:
            self._stopped = True
            raise

    def _put(
        self,
        job: Job,
        weights: list[torch.Tensor],
        stored: list[tuple[dict[str, torch.Tensor], ModuleResult]],
    ) -> None:
        for planned, (tensors, result) in zip(job.modules, stored, strict=True):
            for leaf, tensor in tensors.items():
                self.writer.add(f"{planned.name}.{leaf}", tensor)
            self.modules[planned.name] = result
        if not job.modules:
            for i, name in enumerate(job.names):
                if weights:
                    check_finite(name, weights[i])
                    self.writer.add(name, weights[i])
                else:
                    self.writer.copy(name, self.view, finite_pieces(name, self.view))
