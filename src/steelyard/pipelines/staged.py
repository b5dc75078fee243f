"""All batches through one layer, in stages: each module is computed once, and changed before that.

A stage is a set of modules that are called with one and the same tensor, such as q, k and v. Every
batch runs up to the first module of the stage, shows what flows into it, and waits there. When all
batches wait, whoever drives them may change the modules of the stage; then they go on to the next.
So each module sees what the changed modules before it give, and what comes out in the end is the
output of the layer as it was changed.

A forward that waits is a greenlet: one thread, and a stack for each batch. A batch that waits holds
what its forward has computed so far. Those that do not fit into `budget` are dropped, and start
again from the layer's input when it is their turn; that changes how long it takes, and no bit.

Batches run under `torch.no_grad()` throughout: torch keeps such modes per thread, not per greenlet.
"""

from __future__ import annotations

import contextvars
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Generic, TypeVar

import psutil
import torch
from greenlet import greenlet
from torch.nn import Linear, Module
from torch.utils.hooks import RemovableHandle

from steelyard.errors import PipelineError

__all__ = ["Staged", "find_stages", "holding_budget"]

T = TypeVar("T")


def find_stages(
    modules: Mapping[str, Module], forward: Callable[[], Any], tokens: int
) -> list[list[str]] | None:
    """Return the names of `modules`, those with one input together, in the order of their calls.

    `forward` is run once while the modules give zeros, so that next to nothing is computed.

    None where there are none that hold for all data: unless each module is a Linear that is called
    once, with all `tokens` of the batch, which of them are called may depend on the data.
    """
    if not all(isinstance(module, Linear) for module in modules.values()):
        return None
    calls: list[tuple[str, torch.Tensor]] = []

    def stand_in(name: str, module: Any) -> Callable[..., torch.Tensor]:
        def zeros(*args: Any) -> torch.Tensor:
            calls.append((name, args[0]))
            shape = (*args[0].shape[:-1], module.out_features)
            return torch.zeros(shape, dtype=args[0].dtype, device=args[0].device)

        return zeros

    before = {name: module.__dict__.get("forward") for name, module in modules.items()}
    try:
        for name, module in modules.items():
            module.__dict__["forward"] = stand_in(name, module)
        forward()
    finally:
        for name, module in modules.items():
            del module.__dict__["forward"]
            if before[name] is not None:
                module.__dict__["forward"] = before[name]
    once = sorted(name for name, _ in calls) == sorted(modules)
    if not once or any(x.numel() != tokens * x.shape[-1] for _, x in calls):
        return None
    stages: dict[int, list[str]] = {}
    for name, x in calls:  # which keeps them alive, so that no two have the same id
        stages.setdefault(id(x), []).append(name)
    return list(stages.values())


def holding_budget(device: torch.device) -> int:
    """Return how many bytes batches that wait may hold: a quarter of what is free."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) // 4
    return int(psutil.virtual_memory().available) // 4


class _Pass:
    """The forward of one batch, as far as it has come."""

    def __init__(self, forward: Callable[[], Any]) -> None:
        self.stack = greenlet(forward)
        self.stack.gr_context = contextvars.copy_context()
        self.inputs: dict[int, weakref.ref[torch.Tensor]] = {}  # stage -> what flows into it
        self.called: set[Module] = set()


class Staged(Generic[T]):
    """Drives `forwards` through `stages`, while it is entered.

    stages:   the modules of each, in the order in which they are called
    forwards: one for each batch; called anew where the batch could not be held
    budget:   bytes that waiting batches may hold
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Module]],
        forwards: Sequence[Callable[[], T]],
        budget: int,
    ) -> None:
        self.forwards = forwards
        self.budget = budget
        self._stage_of = {module: i for i, stage in enumerate(stages) for module in stage}
        self._stage = 0  # the one to wait at; those before it are done
        self._see: tuple[Callable[[torch.Tensor], None], ...] = ()
        self._running: _Pass
        self._held: dict[int, tuple[_Pass, int]] = {}  # batch -> what waits, and its bytes
        self._sizes: dict[tuple[int, torch.Size], int] = {}
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Staged[T]:
        self._handles = [m.register_forward_pre_hook(self._called) for m in self._stage_of]
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        for waiting, _ in self._held.values():
            waiting.stack.throw()
        self._held.clear()

    def run_to(self, stage: int, *see: Callable[[torch.Tensor], None]) -> None:
        """Run every batch up to a stage; `see` are shown what flows into it, batch after batch."""
        self._stage, self._see = stage, see
        for index in range(len(self.forwards)):
            waiting, _ = self._go_on(index)
            if waiting.stack.dead:
                raise _irregular()
            size = self._size(waiting)
            if fits(size, (held for _, held in self._held.values()), self.budget):
                self._held[index] = (waiting, size)
            else:
                waiting.stack.throw()

    def finish(self) -> Iterator[T]:
        """Run every batch to its end, after the last stage; yield what comes out."""
        self._stage = len(set(self._stage_of.values()))
        for index in range(len(self.forwards)):
            ended, output = self._go_on(index)
            if len(ended.called) != len(self._stage_of):
                raise _irregular()
            yield output

    def _go_on(self, index: int) -> tuple[_Pass, Any]:
        waiting, _ = self._held.pop(index, (None, 0))
        self._running = one = waiting or _Pass(self.forwards[index])
        return one, one.stack.switch()

    def _size(self, waiting: _Pass) -> int:
        """Return the bytes that a batch holds; those of one shape hold the same."""
        x = waiting.inputs[self._stage]()
        assert x is not None  # its forward has it
        kind = (self._stage, x.shape)
        if kind not in self._sizes:
            self._sizes[kind] = held_bytes(waiting.stack.gr_frame)
        return self._sizes[kind]

    def _called(self, module: Module, args: Any) -> None:
        """Wait where the stage is reached; refuse what was not foreseen."""
        one = self._running
        stage, x = self._stage_of[module], args[0]
        if stage > self._stage or module in one.called:
            raise _irregular()
        if stage not in one.inputs:
            one.inputs[stage] = weakref.ref(x)
            if stage == self._stage:
                for see in self._see:
                    see(x)
                one.stack.parent.switch()
        if one.inputs[stage]() is not x:
            raise _irregular()
        one.called.add(module)


def fits(size: int, held: Iterable[int], budget: int) -> bool:
    """Return whether one more batch may wait beside those that do."""
    return size + sum(held) <= budget


def held_bytes(frame: FrameType | None) -> int:
    """Return the bytes of all tensors that a forward, stopped in `frame`, has in its variables."""
    found: dict[int, int] = {}
    while frame is not None:
        variables = frame.f_locals
        values = list(variables.values())
        while values:
            value = values.pop()
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            elif isinstance(value, (tuple, list, dict)):
                values += value.values() if isinstance(value, dict) else value
        if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()  # a copy before Python 3.13, which would keep the tensors alive
        frame = frame.f_back
    return sum(found.values())


def _irregular() -> PipelineError:
    return PipelineError(
        "a layer calls its modules in another way for one batch than for the first, so they cannot "
        'be quantized one after another; pipeline="basic" runs the model as a whole'
    )
