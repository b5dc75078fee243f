"""From file to file: each tensor is read, quantized and written, and no model is ever built.

Reading, computing and writing overlap: one thread reads ahead, one writes behind, and the kernels
between them use all cores. What is on its way never exceeds a budget, so memory follows the largest
tensor and not the checkpoint. Tensors are written in one order, whatever happens, so a run that is
taken up again ends with the same bytes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.checkpoint import CheckpointView, CheckpointWriter, stored_tensors
from steelyard.observers import Observer
from steelyard.observers.fusion import fused_groups
from steelyard.observers.importance import ImportanceObserver
from steelyard.observers.importance_file import Importance
from steelyard.pipelines.plan import Plan, Planned
from steelyard.pipelines.progress import progress
from steelyard.pipelines.result import ModuleResult
from steelyard.pipelines.weight_errors import relative_error

__all__ = ["Job", "Stream", "budget_of", "jobs_of", "quantize", "restack"]

_LEAST = 128 << 20  # bytes on their way, even where all tensors are small
_ONE_SCALE = ("tensor", "tensor_group")  # strategies in which fused layers share a scale


@dataclass(frozen=True)
class Job:
    """Tensors that are dealt with together.

    names:   those of the source that it takes
    modules: what they are the weights of, if they are to be quantized; else they are copied
    """

    names: tuple[str, ...]
    modules: tuple[Planned, ...] = ()

    def nbytes(self, view: CheckpointView) -> int:
        return sum(view.info(name).nbytes for name in self.names)


def jobs_of(view: CheckpointView, plan: Plan) -> list[Job]:
    """Return what is to be done in the order of the files; layers with one scale go together."""
    planned = {f"{p.name}.weight": p for p in plan.quantized if p.scheme.weights is not None}
    together: dict[str, tuple[str, ...]] = {}
    for group in fused_groups(p.name for p in planned.values()):
        names = tuple(f"{name}.weight" for name in group)
        args = planned[names[0]].scheme.weights
        if args is not None and args.strategy in _ONE_SCALE:
            together.update(dict.fromkeys(names, names))
    jobs: list[Job] = []
    taken: set[str] = set()
    for name in view.names():
        if name in planned and name not in taken:
            names = together.get(name, (name,))
            taken.update(names)
            jobs.append(Job(names, tuple(planned[n] for n in names)))
        elif name not in planned:
            jobs.append(Job((name,)))
    return jobs


def restack(view: CheckpointView, plan: Plan) -> None:
    """Leave the stacked experts of which none is to be quantized as they are stored."""
    planned = {f"{p.name}.weight" for p in plan.quantized}
    for stack in list(view.stacks):
        if not planned.intersection(stack.experts):
            view.restack(stack)


def budget_of(view: CheckpointView, jobs: Sequence[Job]) -> int:
    """Return how many bytes of the source may be on their way at once."""
    return max(_LEAST, 2 * max((j.nbytes(view) for j in jobs if j.modules), default=0))


@torch.no_grad()
def quantize(
    modules: Sequence[Planned], weights: Sequence[torch.Tensor], importance: Importance
) -> Iterator[tuple[dict[str, torch.Tensor], ModuleResult]]:
    """Yield what the file holds for each weight, and how far that is from it."""
    observers = []
    for planned in modules:
        args = planned.scheme.weights
        assert args is not None
        name = args.observer or "memoryless_minmax"
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
        errors = torch.empty(len(weight), dtype=torch.float64)
        stored = stored_tensors(weight, qparams, planned.scheme, errors=errors)
        yield stored, ModuleResult(relative_error(float(errors.sum()), weight), 0)


class Stream:
    """One pass over a checkpoint.

    modules: what became of each module, filled as they are done
    state:   called with the number of jobs that are done; returns what a mark records
    importance: of the modules whose observers use it, from a file
    """

    def __init__(
        self,
        view: CheckpointView,
        plan: Plan,
        writer: CheckpointWriter,
        modules: dict[str, ModuleResult],
        state: Callable[[int], dict[str, Any]],
        importance: Importance | None = None,
        show: bool | None = None,
    ) -> None:
        self.view = view
        self.writer = writer
        self.modules = modules
        self.state = state
        self.importance = importance or {}
        self.show = show
        self.jobs = jobs_of(view, plan)
        self.budget = budget_of(view, self.jobs)
        self.done = 0
        self._stopped = False  # nothing may be written any more

    def run(self, done: int = 0) -> None:
        """Do all jobs but the first `done`, which an earlier run did."""
        self.done = done
        sizes = [job.nbytes(self.view) for job in self.jobs]
        reading, writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        with progress("quantizing", sum(sizes), self.show, unit="bytes") as advance:
            advance(sum(sizes[:done]))
            try:
                self._run(reading, writing, advance)
            except BaseException:
                self._stopped = True
                raise
            finally:
                for pool in (reading, writing):
                    pool.shutdown(cancel_futures=True)

    def _run(
        self,
        reading: ThreadPoolExecutor,
        writing: ThreadPoolExecutor,
        advance: Callable[[int], None],
    ) -> None:
        ahead: deque[tuple[Job, int, Future[list[torch.Tensor]]]] = deque()
        behind: deque[tuple[int, Future[None]]] = deque()
        waiting, on_the_way = self.done, 0

        def finish_oldest() -> None:
            nonlocal on_the_way
            size, written = behind.popleft()
            written.result()
            on_the_way -= size
            advance(size)

        while waiting < len(self.jobs) or ahead:
            while waiting < len(self.jobs):
                job = self.jobs[waiting]
                size = job.nbytes(self.view)
                if on_the_way and on_the_way + size > self.budget:
                    break
                on_the_way += size
                ahead.append((job, size, reading.submit(self._read, job)))
                waiting += 1
            if not ahead:  # all that is on its way waits to be written
                finish_oldest()
                continue
            job, size, read = ahead.popleft()
            weights = read.result()
            stored = list(quantize(job.modules, weights, self.importance)) if job.modules else []
            behind.append((size, writing.submit(self._write, job, weights, stored)))
            del weights, stored, read
            while behind and (behind[0][1].done() or on_the_way > self.budget):
                finish_oldest()
        while behind:
            finish_oldest()

    def _read(self, job: Job) -> list[torch.Tensor]:
        """Return the tensors of a job; what is only copied and large is left to the writer."""
        if not job.modules and job.nbytes(self.view) > self.budget // 4:
            return []
        return [self.view.read(name) for name in job.names]

    def _write(
        self,
        job: Job,
        weights: list[torch.Tensor],
        stored: list[tuple[dict[str, torch.Tensor], ModuleResult]],
    ) -> None:
        if self._stopped:  # else a job could follow one that failed or was cancelled
            return
        try:
            self._put(job, weights, stored)
            self.done += 1
            if self.writer.due():
                self.writer.mark(self.state(self.done))
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
                    self.writer.add(name, weights[i])
                else:
                    self.writer.copy(name, self.view)
