"""Chooses the factor of a pair by the error of its block's output, on held-out batches.

With `uncalibratable="dynamic"` it also chooses whether the readers keep their static scale. Each
bit of a rounded value takes its squared error down by a factor of four: readers for which a static
scale costs more than one bit get dynamic scales.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from steelyard.algorithms.balancing import BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.block_error import BlockError, Candidate
from steelyard.algorithms.guard import is_gain
from steelyard.algorithms.pairs import Pair

__all__ = ["best_of"]

_LEAST_GAIN = 0.01  # of the error; a smaller one changes nothing that can be measured
_FINALISTS = 2  # factors that are measured on all batches; the first batch selects them
_ONE_BIT = 4.0


@dataclass(frozen=True)
class _Choice:
    """The number of a factor, None for none, and the errors by batch without and with it."""

    number: int | None
    before: list[float]
    after: list[float]


def best_of(
    block: Block,
    pair: Pair,
    state: BalancingState,
    factors: Sequence[torch.Tensor],
    batches: int,
) -> int | None:
    """Return the number of the factor with the least error of the block's output, or None.

    A factor wins if the batches' errors fall by more than noise explains, and by at least 1 %. Adds
    the error before and after to `state.gains`, and readers that need dynamic scales to
    `block.dynamic`.

    batches: number of batches to measure on
    """
    measure = BlockError(block, pair, state, batches)
    chosen = _best(measure, factors, dynamic=False)
    if block.unserved == "dynamic" and measure.static:
        chosen = _with_dynamic(measure, factors, chosen)
    if chosen.number is not None:
        state.gains.append((math.fsum(chosen.before), math.fsum(chosen.after)))
    return chosen.number


def _best(measure: BlockError, factors: Sequence[torch.Tensor], dynamic: bool) -> _Choice:
    every = [Candidate(torch.ones_like(factors[0]), dynamic)]
    every += [Candidate(factor, dynamic) for factor in factors]
    first = measure.of(every, stop=1)
    order = sorted(range(1, len(every)), key=lambda i: math.fsum(first[i]))[:_FINALISTS]
    rest = measure.of([every[i] for i in (0, *order)], start=1)
    plain, *errors = ([*first[i], *more] for i, more in zip((0, *order), rest, strict=True))
    best = min(range(len(errors)), key=lambda i: math.fsum(errors[i]))
    after = errors[best]
    shares = [error / own if own else 1.0 for own, error in zip(plain, after, strict=True)]
    falls = math.fsum(after) < (1 - _LEAST_GAIN) * math.fsum(plain)
    if not falls or not is_gain([1.0] * len(shares), shares):
        return _Choice(None, plain, plain)
    return _Choice(order[best] - 1, plain, after)


def _with_dynamic(measure: BlockError, factors: Sequence[torch.Tensor], static: _Choice) -> _Choice:
    """Return the choice with dynamic scales if a static one costs more than a bit."""
    ones = torch.ones_like(factors[0])
    quick = measure.of([Candidate(each, dynamic=True) for each in (ones, factors[0])], stop=1)
    if static.after[0] <= _ONE_BIT * min(math.fsum(each) for each in quick):
        return static
    dynamic = _best(measure, factors, dynamic=True)
    one, other = math.fsum(static.after), math.fsum(dynamic.after)
    if one <= _ONE_BIT * other:
        return static
    ratio = f"{one / other:.1f}" if other else "many"
    reason = (
        f"with one, the output of {measure.block.name} has {ratio} times the squared error that it "
        "has with dynamic ones"
    )
    measure.block.dynamic.update(dict.fromkeys(measure.static, reason))
    return dynamic
