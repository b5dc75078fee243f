"""Runs all batches through one layer in stages: each module is changed, then computed once.

A stage is a set of modules that are called with the same tensor, such as q, k and v. Every batch
runs up to the first module of the stage, hands over its input, and waits. When all batches wait,
the caller may change the modules of the stage; then the batches continue to the next. So each
module gets its input from changed modules, and the output is that of the changed layer.

A waiting forward is a greenlet: a stack for each batch, on one thread of a pool. It holds what it
has computed so far. Batches that do not fit into `budget` are dropped, and start again from the
layer's input when it is their turn; that costs time and changes no bit. If the device runs out of
memory, all are dropped, and those from the current one on are cut in half (`batch_forward`).

Batches run under `torch.no_grad()` throughout: torch keeps such modes per thread, not per greenlet.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import Any, Generic, TypeVar

import torch
from greenlet import getcurrent, greenlet
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from steelyard.distributed import ThreadPool
from steelyard.engine.held_memory import at_once, fits, held_bytes
from steelyard.engine.whole_inputs import see_whole
from steelyard.errors import PipelineError
from steelyard.model.batch_forward import halve, note_alone, parts_of
from steelyard.model.batch_parts import joined

__all__ = ["Staged"]

T = TypeVar("T")


class _Pass(greenlet):  # type: ignore[misc]
    """The forward of one batch, suspended between stages."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        super().__init__(forward)
        self.gr_context = contextvars.copy_context()
        self.inputs: dict[int, weakref.ref[torch.Tensor]] = {}  # stage -> its input
        self.called: set[Module] = set()
        self.output: Any = None  # set at the end

    def input(self, stage: int) -> torch.Tensor:
        x = self.inputs[stage]()
        assert x is not None  # the waiting forward keeps it alive
        return x


class Staged(Generic[T]):
    """Drives `forwards` through `stages`, as a context manager.

    stages:   modules of each stage, in the order of their calls
    forwards: one per batch; called again if the batch was dropped
    tokens:   number of tokens of each batch
    budget:   bytes that waiting batches may hold
    pool:     the threads that batches run on
    copies:   of the modules of each stage, which some forwards call instead of them
    dropped:  called when all batches were dropped; may be set later
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Module]],
        forwards: Sequence[Callable[[], T]],
        tokens: Sequence[int],
        budget: int,
        pool: ThreadPool | None = None,
        copies: Sequence[Sequence[Module]] = (),
    ) -> None:
        self.forwards = list(forwards)
        self.tokens = list(tokens)
        self.numbers = list(range(len(forwards)))  # of the batch that each is, or is a part of
        self.dropped: Callable[[], None] = lambda: None
        self.budget = budget
        self.pool = pool or ThreadPool()
        self._stage_of = {
            module: i for some in (stages, copies) for i, each in enumerate(some) for module in each
        }
        self._calls_each = sum(map(len, stages))
        self._has_copies = bool(copies)
        self._stage = 0  # stage to wait at; earlier ones are done
        self._alone = False  # whether each part is shown on its own, and none waits
        self._held: dict[int, tuple[_Pass, int]] = {}  # batch -> its forward, and its bytes
        self._sizes: dict[tuple[int, torch.Size], int] = {}
        self._rates: dict[int, float] = {}  # stage -> most bytes per token of a batch
        self._handles: list[RemovableHandle] = []
        self._cut()

    def __enter__(self) -> Staged[T]:
        self._handles = [m.register_forward_pre_hook(self._called) for m in self._stage_of]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._drop(list(self._held))

    def run_to(
        self,
        stage: int,
        see: Callable[[int, torch.Tensor], None],
        flush: Callable[[], None] = lambda: None,
    ) -> None:
        """Run every batch up to a stage; call `see` with the stage's input, in batch order.

        see:    called with the index of the batch, and the tensor
        flush:  called after each group of batches, while their tensors are alive
        """
        self._stage = stage
        start = 0
        while start < len(self.forwards):
            indices = range(start, self._stop(start))
            try:
                passes = dict(zip(indices, self.pool.do(self._calls(indices)), strict=True))
            except torch.OutOfMemoryError as error:
                start = self._halve(indices, error)
                continue
            if any(one.dead for one in passes.values()):
                raise _irregular()
            for number, some in itertools.groupby(passes, self.numbers.__getitem__):
                waiting = [(passes[i].gr_context, passes[i].input(stage)) for i in some]
                see_whole(functools.partial(see, number), waiting)
                del waiting  # else dropped batches stay in memory
            flush()
            dropped = []
            for index, one in passes.items():
                del self._held[index]
                size = self._size(one)
                rate = size / self.tokens[index]
                self._rates[stage] = max(rate, self._rates.get(stage, 0.0))
                kept = fits(size, (held for _, held in self._held.values()), self.budget)
                kept = kept and not self._alone
                self._held[index] = (one, size if kept else 0)
                if not kept:
                    dropped.append(index)
            self._drop(dropped)
            start = indices.stop

    def finish(self) -> Generator[T, None, None]:
        """Run every batch from the last stage to its end; yield the outputs.

        Exhaust or close the generator before leaving the context.
        """
        self._stage = len(set(self._stage_of.values()))
        start, outputs = 0, []
        while start < len(self.forwards):
            calls = self._calls(range(start, len(self.forwards)))
            with contextlib.closing(self.pool.begin(calls)) as passes:
                while start < len(self.forwards):
                    try:
                        ended = next(passes)
                    except torch.OutOfMemoryError as error:
                        start = self._halve(range(start, start + 1), error)
                        break
                    if len(ended.called) != self._calls_each:
                        raise _irregular()
                    outputs.append(ended.output)
                    start += 1
                    if self.numbers[start - 1 : start] != self.numbers[start : start + 1]:
                        yield joined(outputs)
                        outputs.clear()

    def has_passed(self, stage: int) -> bool:
        """Whether every batch waits and has called all modules of a stage.

        A later stage may begin before: q_a, q_b, kv_a is an order of calls in which q_a and kv_a
        share an input. A batch that does not wait starts again from the layer's input.
        """
        modules = {module for module, each in self._stage_of.items() if each == stage}
        called = (len(modules & one.called) for one, _ in self._held.values())
        expected = len(modules) // (1 + self._has_copies)
        return len(self._held) == len(self.forwards) and all(n == expected for n in called)

    @property
    def rate(self) -> float:
        """Most bytes per token that a batch held."""
        return max(self._rates.values())

    def _stop(self, start: int) -> int:
        """Return the end of the batches that fit into the budget at this stage.

        All parts of a batch are among them, unless not even single samples can wait for others.
        """
        if self._alone:
            return start + 1
        if self._stage not in self._rates:  # not measured yet
            stop = min(start + self.pool.count, len(self.forwards))
        else:
            left = self.budget - sum(held for _, held in self._held.values())
            stop = start + at_once(self.tokens[start:], self._rates[self._stage], left)
        while self.numbers[stop : stop + 1] == self.numbers[stop - 1 : stop]:
            stop += 1
        return stop

    def _calls(self, indices: Iterable[int]) -> Iterator[tuple[int, Callable[[], _Pass]]]:
        """Yield calls that run a batch up to the stage or its end, on the thread it began on."""

        def resume(index: int) -> _Pass:
            one, size = self._held.get(index) or (_Pass(self.forwards[index]), 0)
            self._held[index] = (one, size)
            try:
                one.output = one.switch()
            finally:
                if one.dead:
                    del self._held[index]
            return one

        return ((index, functools.partial(resume, index)) for index in indices)

    def _halve(self, failed: range, error: torch.OutOfMemoryError) -> int:
        """Drop all batches, and cut them into parts; return the new index of the first failed."""
        waited, forwards = list(self._held), [self.forwards[i] for i in failed]
        self._drop(waited)
        try:
            halve(forwards, error)
        except PipelineError:  # a single sample: it may fit without those that waited
            last = self._stage == len(set(self._stage_of.values()))
            if (last or self._alone) and not waited:
                raise
            if not last and not self._alone:
                self._alone = True
                note_alone(forwards)
        counts = self._cut()
        self.dropped()
        return sum(counts[: failed.start])

    def _cut(self) -> list[int]:
        """Cut batches into parts that fit; return how many parts each has."""
        parts = [parts_of(forward) for forward in self.forwards]
        counts = [len(some) for some in parts]
        self.forwards = [each for some in parts for each in some]
        self.numbers = [n for n, c in zip(self.numbers, counts, strict=True) for _ in range(c)]
        each = zip(self.tokens, counts, strict=True)
        self.tokens = [-(-tokens // c) for tokens, c in each for _ in range(c)]
        return counts

    def _drop(self, indices: Iterable[int]) -> None:
        self.pool.do([(index, self._held.pop(index)[0].throw) for index in indices])

    def _size(self, waiting: _Pass) -> int:
        """Return the bytes that a batch holds, measured once per shape."""
        kind = (self._stage, waiting.input(self._stage).shape)
        if kind not in self._sizes:
            self._sizes[kind] = held_bytes(waiting.gr_frame)
        return self._sizes[kind]

    def _called(self, module: Module, args: Any) -> None:
        """Wait at the stage; raise if the order of calls differs from the first batch's."""
        one = getcurrent()
        assert isinstance(one, _Pass)
        stage, x = self._stage_of[module], args[0]
        if stage > self._stage or module in one.called:
            raise _irregular()
        if stage not in one.inputs:
            one.inputs[stage] = weakref.ref(x)
            if stage == self._stage:
                one.parent.switch()
        if one.inputs[stage]() is not x:
            raise _irregular()
        one.called.add(module)


def _irregular() -> PipelineError:
    return PipelineError(
        "a layer calls its modules in a different order for different batches, so they cannot be "
        'solved in stages; pipeline="basic" runs the model as a whole'
    )
