"""AutoRound: tune the rounding of a block's weights by the error of the block's output.

GPTQ solves the modules first, one after another, each by the error of its own output. Then all of
them are tuned together: offsets of the codes and factors of the scales (`tuned_weight`) move
against the sign of their gradients (`tuned_block`), by a step that falls linearly to zero.

Every eighth batch is held out. The best of some twenty states on those is kept if it is better than
the result of GPTQ by more than noise explains, so that tuning never makes a block worse there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from steelyard.algorithms.algorithm import Algorithm, ModuleResult, Needs
from steelyard.algorithms.block import Block
from steelyard.algorithms.gptq import GPTQ
from steelyard.algorithms.guard import is_gain
from steelyard.algorithms.tuned_block import TunedBlock
from steelyard.algorithms.tuned_weight import TunedWeight
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.checkpoint.weight_errors import relative_error
from steelyard.modifiers.autoround import AutoRoundModifier
from steelyard.observers.hessians import Hessians
from steelyard.plan.plan import Plan

__all__ = ["AutoRound"]

_HELD_OUT = 8  # one batch of these
_CHECKS = 20  # times that the held-out batches run
_SCALE_STEP = 0.1  # step of scale factors, in steps of offsets
_BYTES = 30  # per weight of a block: target, offset, value, gradients

Stored = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> weight, scale


@Algorithm.register("autoround")
class AutoRound(GPTQ):
    """Solves modules as GPTQ does, then tunes each block."""

    modifier: AutoRoundModifier

    def __init__(self, modifier: AutoRoundModifier) -> None:
        super().__init__(modifier)
        self._originals: dict[str, torch.Tensor] = {}  # weights of the current block

    @property
    def needs(self) -> Needs:
        tunes = self.modifier.iters > 0
        return replace(super().needs, originals=tunes, tuning=tunes)

    def memory(self, plan: Plan) -> int:
        if not self.modifier.iters:
            return super().memory(plan)
        sizes: dict[str, int] = {}
        for planned in plan.quantized:
            number = re.search(r"\.(\d+)\.", planned.name)
            if number:
                rows, columns = planned.shape
                sizes[number[1]] = sizes.get(number[1], 0) + rows * columns
        states = 2 * 4 * plan.tokens * plan.hidden  # of the unquantized model, in and out
        return max(super().memory(plan), _BYTES * max(sizes.values(), default=0)) + states

    def tuning_passes(self, samples: int) -> float:
        step = 3 * min(self.modifier.batch_size, samples) / max(samples, 1)  # with gradients
        return self.modifier.iters * step + (_CHECKS / _HELD_OUT if self.modifier.iters else 0)

    def solve(self, block: Block, state: Hessians) -> dict[str, ModuleResult]:
        for name in state.modules if self.modifier.iters else ():
            self._originals[name] = block.tensor(f"{name}.weight")
        return super().solve(block, state)

    # -- tuning -------------------------------------------------------------------------------

    def tune(self, block: Block, found: Mapping[str, ModuleResult]) -> dict[str, ModuleResult]:
        originals, self._originals = self._originals, {}
        outputs = zip(block.numbers, block.originals, strict=False)  # none outside of the layers
        own = [(number, _samples(out)) for number, (_, out) in outputs]
        batches = dict(sorted(each for some in block.ranks.gather(own) for each in some))
        if not originals or len(batches) < 2:
            if originals:
                reason = "it has one batch of data" if batches else "it is outside of the layers"
                where = block.name or ", ".join(originals)
                block.notes.append(f"{where}: rounded by GPTQ and not tuned, since {reason}")
            return {}
        scales = self.modifier.enable_minmax_tuning
        tuned = {
            name: TunedWeight(block.modules[name], weight, scales)
            for name, weight in originals.items()
        }
        best, figures = self._descend(block, tuned, batches)
        return {
            name: _applied(block, name, originals[name], *best[name], found[name], figures)
            for name in tuned
        }

    def _descend(
        self, block: Block, tuned: Mapping[str, TunedWeight], batches: Mapping[int, int]
    ) -> tuple[Stored, dict[str, Any]]:
        """Return the best weights and scales on held-out batches, and figures.

        batches: of all ranks, number -> samples
        """
        iters = self.modifier.iters
        lr = self.modifier.lr or 1 / iters
        scale_lr = self.modifier.minmax_lr or lr * _SCALE_STEP
        numbers = list(batches)
        held_out = numbers[_HELD_OUT - 1 :: _HELD_OUT] or numbers[-1:]
        training = [number for number in numbers if number not in held_out]
        at_once = max(1, round(self.modifier.batch_size / batches[numbers[0]]))
        steps = _minibatches(training, at_once, self.modifier.seed)
        run = TunedBlock(block, tuned)
        best: Stored = {name: each.start for name, each in tuned.items()}
        best_step, every = 0, max(iters // _CHECKS, 1)

        def judged(state: Stored) -> list[float]:
            run.weights = {name: each.decoded(*state[name]) for name, each in tuned.items()}
            return run.losses(held_out)

        with run.entered():
            start = least = judged(best)
            for step in range(1, iters + 1):
                run.weights = _values(block, tuned)
                gradients = run.gradients(next(steps))
                left = 1 - (step - 1) / iters
                calls = (
                    partial(tuned[name].step, gradient.float(), lr * left, scale_lr * left)
                    for name, gradient in gradients.items()
                )
                block.pool.do(enumerate(calls))
                if step % every == 0 or step == iters:
                    state = {name: each.stored() for name, each in tuned.items()}
                    loss = judged(state)
                    if math.fsum(loss) < math.fsum(least):
                        best, least, best_step = state, loss, step
                block.advance(1 / iters, f"tuning {block.name}, step {step} of {iters}")
        if not is_gain(start, least):
            best, least, best_step = {name: each.start for name, each in tuned.items()}, start, 0
        found = {"held_out_loss": [math.fsum(start), math.fsum(least)], "tuning_step": best_step}
        return best, found


def _samples(hidden: torch.Tensor) -> int:
    return len(hidden) if hidden.ndim > 2 else 1


def _minibatches(numbers: Sequence[int], size: int, seed: int) -> Iterator[list[int]]:
    """Yield batches for each step; all of them come once before any comes again."""
    generator = torch.Generator().manual_seed(seed)
    waiting: list[int] = []
    size = min(size, len(numbers))
    while True:
        while len(waiting) < size:
            order = torch.randperm(len(numbers), generator=generator).tolist()
            waiting += [numbers[i] for i in order]
        yield waiting[:size]
        del waiting[:size]


@torch.no_grad()
def _values(block: Block, tuned: Mapping[str, TunedWeight]) -> dict[str, torch.Tensor]:
    def values(each: TunedWeight) -> torch.Tensor:
        with torch.no_grad():
            return each.values()

    found = block.pool.do((i, partial(values, each)) for i, each in enumerate(tuned.values()))
    return dict(zip(tuned, found, strict=True))


def _applied(
    block: Block,
    name: str,
    original: torch.Tensor,
    weight: torch.Tensor,
    scale: torch.Tensor,
    found: ModuleResult,
    figures: Mapping[str, Any],
) -> ModuleResult:
    """Store weight and scale of a module; return its result."""
    details = {**found.details, **figures}
    if not figures["tuning_step"]:
        return replace(found, details=details)
    module = block.modules[name]
    module.register_parameter("weight_scale", Parameter(scale, requires_grad=False))
    block.change(f"{name}.weight", original)
    drawn = module_figures(module, after=weight)
    block.change(f"{name}.weight", weight)
    off = (original.float() - weight.float()).square_()
    error = relative_error(float(off.sum(dtype=torch.float64)), original)
    return ModuleResult(error, found.tokens, with_figures(details, drawn))
