"""Runs calibration batches through a block, and has it transformed and solved.

Several threads call the same module. That is safe while a call changes nothing in it: its
quantization is off, or its weight is rounded already (`rounded_once`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms import Block, ModuleResult
from steelyard.distributed import ThreadPool
from steelyard.engine.block_outputs import BlockOutputs
from steelyard.engine.block_work import Moment, Work
from steelyard.engine.held_memory import CONCURRENT_BYTES, at_once
from steelyard.engine.observing import observe
from steelyard.engine.paired import paired, pairs, quantized, with_originals
from steelyard.engine.parts import Flow, Part
from steelyard.engine.second_pass import hold_rounded, run_again, tuned
from steelyard.engine.showing import Stage, points_of, showing, stages_of, until_seen
from steelyard.engine.solving import Solver
from steelyard.engine.stage_order import find_stages
from steelyard.engine.stages import Staged
from steelyard.engine.token_paths import TokenPaths
from steelyard.errors import PipelineError
from steelyard.fusion import fused_groups
from steelyard.model.freed_memory import return_memory
from steelyard.model.placeholders import first_tensor
from steelyard.model.precision import Forward, computing_in, rounded_once
from steelyard.observers.calibration import Calibration
from steelyard.observers.lifecycle import with_schemes

__all__ = ["Passes"]


class Passes:
    """Runs batches through a block: several at once in stages, or one by one with hooks.

    propagate: give each block the output of the quantized blocks before it
    forward:   the types to compute in
    """

    def __init__(self, solver: Solver, pool: ThreadPool, propagate: bool, forward: Forward) -> None:
        self.solver = solver
        self.pool = pool
        self.propagate = propagate
        self.forward = forward
        self.dtype = forward.dtype
        self._moment = Moment()  # the current batch
        self._paths = TokenPaths(solver.result.notes)

    def through(self, part: Part, flow: Flow) -> dict[str, ModuleResult]:
        """Transform and solve a part of the model while its batches run through it."""
        for algorithm in self.solver.transforms:
            self._transform(algorithm, part, flow)
        if not with_schemes(part.root, part.name, part.without):
            unquantized = pairs(part, flow, None, self.pool, self.dtype)
            run_again(part, unquantized, self.pool, self.dtype)
            return {}
        outputs = BlockOutputs(part, flow, self.solver, self.pool, self.dtype)
        stages = self._stages(part, flow) if flow.collect is not None else None
        staged = stages is not None and self.solver.solving_needs("staged")
        flow = pairs(part, flow, stages if staged else None, self.pool, self.dtype)
        self.solver.note_drift(part, flow, staged)
        if stages is None or not staged:
            return outputs.added_to(self._in_passes(part, flow, stages))
        return outputs.added_to(self._in_stages(part, flow, stages))

    def _outputs(self, flow: Flow, turn: int = 0) -> Iterator[Any]:
        """Run the batches one by one, and yield their outputs."""
        for (batch, partial_sum), forward in zip(flow.places, flow.forwards, strict=True):
            self._moment = Moment(batch, partial_sum, turn)
            yield forward()

    def _block(
        self, part: Part, calibration: Calibration | None, flow: Flow, changed: set[str]
    ) -> Block:
        return self.solver.block(
            part.name,
            part.root,
            part.without,
            calibration,
            forwards=[functools.partial(self._run, part.root, run) for run in flow.forwards],
            originals=part.originals,
            changed=changed,
        )

    def _run(self, root: Module, forward: Callable[[], Any]) -> Any:
        with computing_in(root, self.dtype):
            return first_tensor(forward())

    # -- transforms ---------------------------------------------------------------------------

    def _transform(self, algorithm: Any, part: Part, flow: Flow) -> None:
        """Run the batches for an algorithm, then let it change tensors."""
        work = self.solver.begin_transform(algorithm, self._block(part, None, flow, part.changed))
        if work is None:
            return
        with computing_in(part.root, self.dtype):
            for turn in range(work.passes if algorithm.needs.sees else 0):
                observe(work, flow.forwards, flow.places, turn, self.pool, self.solver.ranks)
        work.join()
        work.transform()

    # -- in passes ----------------------------------------------------------------------------

    def _in_passes(
        self, part: Part, flow: Flow, stages: list[Stage] | None
    ) -> dict[str, ModuleResult]:
        """Solve all modules after one pass; a second computes the input of the next block."""
        again = flow if self.propagate and flow.collect is not None else None
        reruns = self.solver.solving_needs("gradients") or self.solver.tunes
        every = [each for stage in stages for each in stage.names] if stages else None
        points = points_of(part.root, with_schemes(part.root, part.name, part.without))
        solved: set[str] = set()
        held: list[torch.Tensor] = []
        with Calibration(part.root, part.name, part.without, every, points) as calibration:
            block = self._block(part, calibration, flow, solved)
            work = self.solver.begin(block)
            with computing_in(part.root, self.dtype), contextlib.ExitStack() as hooks:
                if stages is not None:
                    self._concurrently(calibration, work, stages, flow)
                else:
                    now = functools.partial(getattr, self, "_moment")
                    hooks.enter_context(work.hooked(work.see_now(now), points))
                    hooks.enter_context(showing(points, calibration, work, now))
                    if again is not None and not self.solver.solving_needs("outputs"):
                        attention = self.solver.solving_needs("attention")
                        hooks.enter_context(until_seen(part.root, calibration, points, attention))
                    for turn in range(work.passes):
                        outputs = self._outputs(flow, turn)
                        if flow.collect is None or self.propagate or turn < work.passes - 1:
                            exhaust(outputs)
                        elif reruns:
                            held.extend(outputs)  # `solve` or `tune` still runs the inputs
                        else:
                            flow.collect(outputs)
            found = self.solver.solve(block, work)
        found |= tuned(self.solver, part, flow, found, self.dtype)
        if held and flow.collect is not None:
            flow.collect(held)
        part.changed.update(name for name in solved if not _is_solved(name, calibration))
        if again is not None:
            run_again(part, again, self.pool if stages else ThreadPool(), self.dtype)
        return found

    def _concurrently(
        self, calibration: Calibration, work: Work, stages: list[Stage], flow: Flow
    ) -> None:
        """Observe the inputs of a layer's modules, with several batches at once."""
        assert flow.collect is not None
        parts = [stage.called for stage in stages]
        calibration.take_over()
        begun = 0  # index of the first batch of the current group

        def see(stage: Stage, turn: int, index: int, x: Any) -> None:
            x = self.forward.multiplied(x)
            stage.show(x, calibration, work, Moment(*flow.places[begun + index], turn))

        def outputs(turn: int, last: bool) -> Generator[torch.Tensor, None, None]:
            nonlocal begun
            begun, count = 0, self.pool.count
            while begun < len(flow.forwards):
                some = slice(begun, begun + count)
                batches = flow.forwards[some], flow.tokens[some]
                with Staged(parts, *batches, sys.maxsize, self.pool) as staged:
                    for index, stage in enumerate(stages):
                        shown = functools.partial(see, stage, turn)
                        staged.run_to(index, shown, work.flush)
                    if last and not self.propagate:
                        yield from staged.finish()
                begun += count
                fitting = at_once(flow.tokens[begun:], staged.rate, CONCURRENT_BYTES)
                count = max(fitting, self.pool.count)

        for turn in range(work.passes):
            last = turn == work.passes - 1
            with contextlib.closing(outputs(turn, last)) as shown:
                if self.propagate or not last:
                    exhaust(shown)
                else:
                    flow.collect(shown)

    # -- in stages ----------------------------------------------------------------------------

    def _in_stages(self, part: Part, flow: Flow, stages: list[Stage]) -> dict[str, ModuleResult]:
        """Solve the modules of a layer in the order of their calls, in a single pass."""
        assert flow.collect is not None
        modules = [module for stage in stages for module in stage.modules.values()]
        found: dict[str, ModuleResult] = {}
        with (
            computing_in(part.root, self.dtype, without=modules),
            contextlib.ExitStack() as rounded,
            paired(part, flow, stages, self.pool, self.dtype, self.solver.device) as staged,
        ):
            done: list[Stage] = []
            staged.dropped = functools.partial(hold_rounded, rounded, self.dtype, done)
            for index, stage in enumerate(stages):
                found |= self._stage(part, flow, staged, index, stage, rounded)
                done.append(stage)
                if self.dtype is not None or stage.point is not None:
                    return_memory()  # of Hessians, before wider weights or experts need more
                for number, each in enumerate(done):
                    if not staged.has_passed(number):
                        rounded.enter_context(rounded_once(each.modules.values(), self.dtype))
            with contextlib.closing(staged.finish()) as outputs:
                (exhaust if self.solver.tunes else flow.collect)(quantized(outputs, flow))
        if self.solver.tunes:
            found |= tuned(self.solver, part, flow, found, self.dtype)
            run_again(part, flow, self.pool, self.dtype)
        return found

    def _stage(
        self,
        part: Part,
        flow: Flow,
        staged: Staged[Any],
        index: int,
        stage: Stage,
        rounded: contextlib.ExitStack,
    ) -> dict[str, ModuleResult]:
        """Run all batches up to a stage, and solve its modules.

        rounded: holds the weights of the stages before in the type to compute in; closed when the
                 batches have passed them, so that they take no memory while modules are solved
        """
        solved: set[str] = set()
        routed = stage.names if stage.point is not None else ()
        with Calibration(part.root, part.name, None, stage.names, routed) as calibration:
            block = self._block(part, calibration, flow, solved)
            work = self.solver.begin(block)
            calibration.take_over()

            def see(index: int, x: Any, original: Any = None) -> None:
                x, original = map(self.forward.multiplied, (x, original))
                stage.show(x, calibration, work, Moment(*flow.places[index]), original)

            staged.run_to(index, with_originals(see) if flow.originals else see, work.flush)
            rounded.close()
            found = self.solver.solve(block, work)
            part.changed.update(name for name in solved if not _is_solved(name, calibration))
            return found

    def _stages(self, part: Part, flow: Flow) -> list[Stage] | None:
        """Return the modules of a layer in the order of their calls; None if hooks are needed.

        Hooks are needed where an algorithm needs more than inputs, outputs or attention states are
        observed, the data decides which modules are called, the server fuses modules with different
        inputs, or a staged or tuning algorithm runs without propagated error.
        """
        modules: dict[str, Any] = dict(with_schemes(part.root, part.name))
        schemes = [module.quantization_scheme for module in modules.values()]
        outputs = any(scheme.output_activations is not None for scheme in schemes)
        more = any(map(self.solver.solving_needs, ("outputs", "attention", "calls", "gradients")))
        staged = self.solver.solving_needs("staged")
        alone = (staged or self.solver.tunes) and not self.propagate
        if outputs or more or not modules or alone or (staged and self.solver.passes > 1):
            return None
        stages, stays, points = None, None, points_of(part.root, modules)
        if flow.forwards:
            with (
                computing_in(part.root, self.dtype, without=modules.values()),
                contextlib.suppress(PipelineError),  # a weight that is read, not called
            ):
                stages = find_stages(modules, flow.forwards[0], flow.tokens[0], points, self.dtype)
            if stages is not None and staged and self.solver.solving_needs("token_weights"):
                stays = self._paths.stay(part, stages, flow.forwards[0], self.dtype)
        every = self.solver.ranks.gather((bool(flow.forwards), stages, stays))
        found = ((order, own) for has_data, order, own in every if has_data)
        stages, stays = next(found, (None, None))
        stage_of = {each: i for i, stage in enumerate(stages or ()) for each in stage}
        fused = fused_groups(stage_of)
        if stages is None or any(len({stage_of[n] for n in g}) > 1 for g in fused):
            return None
        return stages_of(stages, modules, points, stays or [False] * len(stages))


def exhaust(outputs: Iterable[Any]) -> None:
    collections.deque(outputs, maxlen=0)


def _is_solved(name: str, calibration: Calibration) -> bool:
    """Whether a changed tensor is the weight of a quantized module, which is stored as codes."""
    module, _, leaf = name.rpartition(".")
    return leaf == "weight" and module in calibration.modules
