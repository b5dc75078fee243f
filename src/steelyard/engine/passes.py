"""How data passes through a part of a model: in stages, or in one or two passes with hooks."""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch.nn import Module

from steelyard.algorithms.gptq import Gathering
from steelyard.algorithms.module_result import ModuleResult
from steelyard.distributed import ThreadPool
from steelyard.engine.decisions import Decisions
from steelyard.engine.stages import BESIDE, Staged, at_once, find_stages, holding_budget
from steelyard.fusion import fused_groups
from steelyard.model.early_stop import StopAfter
from steelyard.model.source import computing_in, rounded_once
from steelyard.observers.calibration import Calibration
from steelyard.observers.lifecycle import with_schemes

__all__ = ["Onward", "Passes"]

T = TypeVar("T")


@dataclass(frozen=True)
class Onward:
    """How the batches come from one quantized layer to the next.

    forwards: what each batch makes of the layer
    take:     takes what came out, batch after batch
    tokens:   of each batch
    """

    forwards: Sequence[Callable[[], torch.Tensor]]
    take: Callable[[Iterable[torch.Tensor]], None]
    tokens: Sequence[int]


class Passes:
    """Lets data pass, and has the modules decided on that it has passed.

    Several threads run through one and the same module. That is safe as long as calling it changes
    nothing in it: its quantization is off, or its weight is rounded already (`rounded_once`).

    propagate: show each layer what the quantized layers before it give
    dtype:     the type to compute in; None for that of the model
    lanes:     of this rank's batches; see `kernels.partial_sums`
    """

    def __init__(
        self, decisions: Decisions, pool: ThreadPool, propagate: bool, dtype: torch.dtype | None
    ) -> None:
        self.decisions = decisions
        self.pool = pool
        self.propagate = propagate
        self.dtype = dtype
        self.lanes: list[int] = []
        self._lane = 0  # of the batch that flows

    def in_lanes(self, values: Sequence[T]) -> Iterator[T]:
        """Yield what there is of each of this rank's batches, and note the lane that it is in."""
        for lane, value in zip(self.lanes, values, strict=True):
            self._lane = lane
            yield value

    def through(
        self,
        module: Module,
        name: str,
        without: Module | None,
        run: Callable[[], None],
        onward: Onward | None,
    ) -> dict[str, ModuleResult]:
        """Return what is found for the modules of `module` while data passes through it.

        run:    passes all data through the module, as it is before
        onward: the batches, where the module is a layer
        """
        stages = self._stages(module, name, onward) if onward is not None else None
        if onward is None or stages is None or self.decisions.gptq is None:
            return self._in_passes(module, name, without, run, onward, stages)
        return self._in_stages(module, name, stages, onward)

    def _begin(self, calibration: Calibration) -> Gathering | None:
        return self.decisions.begin(calibration, lambda: self._lane)

    def _in_passes(
        self,
        module: Module,
        name: str,
        without: Module | None,
        run: Callable[[], None],
        onward: Onward | None,
        stages: list[list[str]] | None,
    ) -> dict[str, ModuleResult]:
        """Decide on all modules after one pass; another shows the next layer what comes of it."""
        again = onward if self.propagate else None
        every = [each for stage in stages for each in stage] if stages else None
        with Calibration(module, name, without, every) as calibration:
            gptq = self._begin(calibration)
            with computing_in(module, self.dtype), contextlib.ExitStack() as looking:
                if stages is not None and onward is not None:
                    self._beside(calibration, stages, onward)
                else:
                    if gptq is not None:
                        looking.enter_context(gptq)
                    if again is not None:
                        looking.enter_context(self._until_seen(module, calibration))
                    run()
            found = self.decisions.decide(calibration, gptq)
        if again is not None:
            pool = self.pool if stages is not None else ThreadPool()  # of one
            rounded = rounded_once(calibration.modules.values())
            with computing_in(module, self.dtype, scales=True), rounded:
                outputs = pool.begin(enumerate(again.forwards))
                with contextlib.closing(outputs):
                    again.take(outputs)
        return found

    def _beside(self, calibration: Calibration, stages: list[list[str]], onward: Onward) -> None:
        """Show the modules of a layer what flows into them, with several batches on their way."""
        parts = [[calibration.modules[each] for each in stage] for stage in stages]
        calibration.take_over()

        def see(stage: list[str], _index: int, x: torch.Tensor) -> None:
            calibration.show(stage, x)

        def outputs() -> Generator[torch.Tensor, None, None]:
            start, count = 0, self.pool.count
            while start < len(onward.forwards):
                some = slice(start, start + count)
                part = Staged(
                    parts, onward.forwards[some], onward.tokens[some], sys.maxsize, self.pool
                )
                with part as staged:
                    for index, stage in enumerate(stages):
                        staged.run_to(index, functools.partial(see, stage))
                    if not self.propagate:
                        yield from staged.finish()
                start += count
                fitting = at_once(onward.tokens[start:], staged.rate, BESIDE)
                count = max(fitting, self.pool.count)

        with contextlib.closing(outputs()) as shown:
            if self.propagate:
                collections.deque(shown, maxlen=0)
            else:
                onward.take(shown)

    def _in_stages(
        self, layer: Module, name: str, stages: list[list[str]], onward: Onward
    ) -> dict[str, ModuleResult]:
        """Decide on the modules of a layer in the order of their calls, in a single pass."""
        modules = with_schemes(layer, name)
        parts = [[modules[each] for each in stage] for stage in stages]
        found: dict[str, ModuleResult] = {}
        budget = holding_budget(self.decisions.device)
        with (
            computing_in(layer, self.dtype, without=modules.values()),
            contextlib.ExitStack() as decided,
            Staged(parts, onward.forwards, onward.tokens, budget, self.pool) as staged,
        ):
            for index, stage in enumerate(stages):
                found |= self._stage(layer, name, staged, index, stage)
                for module in parts[index]:
                    decided.enter_context(computing_in(module, self.dtype, scales=True))
                decided.enter_context(rounded_once(parts[index]))
            with contextlib.closing(staged.finish()) as outputs:
                onward.take(outputs)
        return found

    def _stage(
        self, layer: Module, name: str, staged: Staged[Any], index: int, stage: list[str]
    ) -> dict[str, ModuleResult]:
        """Run all batches up to a stage, and decide on its modules."""
        with Calibration(layer, name, shown=stage) as calibration:
            gptq = self._begin(calibration)
            assert gptq is not None

            def see(batch: int, x: torch.Tensor) -> None:
                self._lane = self.lanes[batch]
                calibration.show(stage, x)
                gptq.show(x)

            staged.run_to(index, see, gptq.settle)
            return self.decisions.decide(calibration, gptq)

    def _stages(self, layer: Module, name: str, onward: Onward) -> list[list[str]] | None:
        """Return the modules of a layer in the order of their calls; None where hooks must tell.

        That is where outputs or the states of attention are observed, where the data may say which
        modules are called, where the server fuses modules of different inputs, with GPTQ on what
        was there before, and where nothing is to be gained.
        """
        modules = with_schemes(layer, name)
        outputs = any(_scheme(m).output_activations is not None for m in modules.values())
        if outputs or not modules or (self.decisions.gptq is not None and not self.propagate):
            return None
        stages = None
        gains = self.decisions.gptq is not None or self.pool.count > 1
        if self.decisions.ranks.is_first and gains:  # who always has a batch
            with computing_in(layer, self.dtype, without=modules.values()):
                stages = find_stages(modules, onward.forwards[0], onward.tokens[0])
        stages = self.decisions.ranks.broadcast(stages)
        stage_of = {each: i for i, stage in enumerate(stages or ()) for each in stage}
        fused = fused_groups(stage_of)
        return stages if all(len({stage_of[n] for n in g}) == 1 for g in fused) else None

    def _until_seen(self, layer: Module, calibration: Calibration) -> Any:
        """End the first of two passes where nothing is left to be seen, such as before `down_proj`.

        Outputs, and the states of attention, are seen only when a module has run.
        """
        inputs = all(base in ("weight", "input") for _, base, _ in calibration.observers())
        if not inputs or not calibration.modules:
            return contextlib.nullcontext()
        return StopAfter(layer, calibration.modules.values())


def _scheme(module: Any) -> Any:
    return module.quantization_scheme
