"""AutoRound: tune the rounding of a block's weights by the error of the block's output.

GPTQ solves the modules first, one after another, each by the error of its own output. Then all of
them are tuned together: offsets of the codes and factors of the scales (`tuned_weight`) move
against the sign of their gradients (`tuned_block`), by a step that falls linearly to zero.

One batch of sixteen is held out, from GPTQ's Hessians too: a start that was fitted to the batches
that judge it looks better on them than it is, and nothing would ever win. The best of some states
is kept if it is better there than the start by more than noise explains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch.nn import Parameter

from steelyard.algorithms.algorithm import Algorithm, ModuleResult, Needs, Seen
from steelyard.algorithms.block import Block
from steelyard.algorithms.gptq import GPTQ
from steelyard.algorithms.guard import is_gain
from steelyard.algorithms.tuned_block import TunedBlock
from steelyard.algorithms.tuned_weight import TunedWeight
from steelyard.checkpoint.figures import module_figures, with_figures
from steelyard.checkpoint.weight_errors import relative_error
from steelyard.kernels.gptq_rounding import GPTQResult
from steelyard.modifiers.autoround import AutoRoundModifier
from steelyard.observers.hessians import Hessians
from steelyard.plan.plan import Plan

__all__ = ["AutoRound"]

_HELD_OUT = 16  # one batch of these
_CHECKS = 8  # times that the held-out batches run
_SCALE_STEP = 0.1  # step of scale factors, in steps of offsets
_BYTES = 34  # per weight of a block: wanted value, target, offset, value, gradients

Stored = dict[str, tuple[torch.Tensor, torch.Tensor]]  # name -> weight, scale


@Algorithm.register("autoround")
class AutoRound(GPTQ):
    """Solves modules as GPTQ does, then tunes each block."""

    modifier: AutoRoundModifier

    def __init__(self, modifier: AutoRoundModifier) -> None:
        super().__init__(modifier)
        self._originals: dict[str, torch.Tensor] = {}  # weights of the current block
        self._wanted: dict[str, torch.Tensor] = {}  # of this rank's modules; see `tuned_weight`
        self._holds_out = False  # whether the current block is tuned

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

    def begin(self, block: Block) -> Hessians:
        self._holds_out = self.modifier.iters > 0 and bool(block.name)
        return super().begin(block)

    def see(self, state: Hessians, seen: Seen) -> None:
        if not (self._holds_out and _is_held_out(seen.batch)):
            super().see(state, seen)

    def solve(self, block: Block, state: Hessians) -> dict[str, ModuleResult]:
        for name in state.modules if self.modifier.iters else ():
            self._originals[name] = block.tensor(f"{name}.weight")
        return super().solve(block, state)

    def _rounded(
        self,
        state: Hessians,
        name: str,
        target: torch.Tensor | None,
        hessian: torch.Tensor,
        result: GPTQResult,
    ) -> None:
        if self._holds_out:
            weight: Any = state.modules[name].weight
            value = result.weight.float()
            off = (weight.data if target is None else target).float() - value
            self._wanted[name] = value + _pull(off, hessian, self._dampening(state, name))

    # -- tuning -------------------------------------------------------------------------------

    def tune(self, block: Block, found: Mapping[str, ModuleResult]) -> dict[str, ModuleResult]:
        originals, self._originals = self._originals, {}
        if not originals:
            return {}
        outputs = zip(block.numbers, block.originals, strict=False)  # none outside of the layers
        own = [(number, _samples(out)) for number, (_, out) in outputs]
        batches = dict(sorted(each for some in block.ranks.gather(own) for each in some))
        wanted: dict[str, torch.Tensor] = {}
        for some in block.ranks.gather(self._wanted):
            wanted |= {name: value.to(block.device) for name, value in some.items()}
        self._wanted = {}
        if (reason := _untunable(batches)) is not None:
            where = block.name or ", ".join(originals)
            block.notes.append(f"{where}: rounded by GPTQ and not tuned, since {reason}")
            return {}
        scales = self.modifier.enable_minmax_tuning
        tuned = {
            name: TunedWeight(block.modules[name], wanted.pop(name, weight), scales)
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
        held_out = [number for number in batches if _is_held_out(number)]
        training = [number for number in batches if not _is_held_out(number)]
        at_once = max(1, round(self.modifier.batch_size / batches[training[0]]))
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


def _is_held_out(batch: int) -> bool:
    """Whether a batch judges; where there are few, more of them do: 1, 9, 25, 41 and so on."""
    return batch == 1 or batch % _HELD_OUT == 9


def _untunable(batches: Collection[int]) -> str | None:
    """Return why a block cannot be tuned with these batches, if it cannot."""
    if not batches:
        return "it is outside of the layers"
    if len(batches) == 1:
        return "it has one batch of data"
    held_out = sum(map(_is_held_out, batches))
    return None if 0 < held_out < len(batches) else "none or all of its batches are held out"


def _pull(off: torch.Tensor, hessian: torch.Tensor, dampening_frac: float) -> torch.Tensor:
    """Return how far each weight would move if it alone could, (out, in).

    off: (out, in), the error of the weights
    """
    added = dampening_frac * hessian.diagonal().mean()
    return (off @ hessian).add_(off * added).div_(hessian.diagonal() + added)


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
