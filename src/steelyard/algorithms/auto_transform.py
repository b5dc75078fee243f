"""Chooses between no transform, SmoothQuant and AWQ for each pair, by the error of the block.

The block runs with the pair as it would be stored: source and readers rounded, and the inputs of
the readers if the scheme rounds them. Its output is compared with that of the unquantized block.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.as_stored import Rounding, rounded_inputs, rounded_weights
from steelyard.algorithms.awq import best_factor
from steelyard.algorithms.balancing import Balancing, BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.pair_check import replaced_tensors
from steelyard.algorithms.pair_error import is_quantized
from steelyard.algorithms.pairs import Folded, Pair, folded
from steelyard.algorithms.smoothing import largest_weights, smoothed
from steelyard.modifiers.auto_transform import TransformModifier

__all__ = ["AutoTransform"]

_STRENGTHS = (0.4, 0.6, 0.8)  # of SmoothQuant
_LEAST_GAIN = 0.01  # of the error; a smaller one is within noise


@Algorithm.register("auto_transform")
class AutoTransform(Balancing):
    """Folds the factor into each pair with which the block's output has the least error."""

    modifier: TransformModifier

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        if not any(is_quantized(block, name) for name in pair.readers):
            return None
        factors = list(self._candidates(block, pair, state))
        if not factors:
            return None
        factors.insert(0, torch.ones_like(factors[0]))
        errors = self._errors(block, pair, state, factors)
        best = min(range(len(factors)), key=errors.__getitem__)
        if errors[best] >= (1 - _LEAST_GAIN) * errors[0]:
            return None
        state.gains.append((errors[0], errors[best]))
        return factors[best]

    def _candidates(
        self, block: Block, pair: Pair, state: BalancingState
    ) -> Iterator[torch.Tensor]:
        inputs, which = state.magnitudes(pair), self.modifier.transform
        if inputs is None:
            return
        if which in ("auto", "smoothquant"):
            weights = largest_weights(block, pair)
            yield from (smoothed(inputs, weights, strength) for strength in _STRENGTHS)
        if which in ("auto", "awq"):
            found = best_factor(block, pair, state, self.modifier.n_grid, "both")
            if found is not None:
                yield found[0]

    def _errors(
        self, block: Block, pair: Pair, state: BalancingState, factors: Sequence[torch.Tensor]
    ) -> list[float]:
        """Return the squared error of the block's output with each factor, summed over batches."""
        mine = _measured(block, state, self.modifier.batches)
        found: dict[int, list[float]] = {number: [] for _, number in mine}
        outputs = {number: block.forward(index) for index, number in mine}
        for factor in factors:
            candidate = folded(block, pair, factor)
            with as_stored(block, pair, state, candidate, outputs):
                for index, number in mine:
                    off = block.forward(index).double() - outputs[number].double()
                    found[number].append(float(off.square().sum()))
        every = {n: errors for part in block.ranks.gather(found) for n, errors in part.items()}
        return [math.fsum(every[n][i] for n in sorted(every)) for i in range(len(factors))]


def _measured(block: Block, state: BalancingState, limit: int) -> list[tuple[int, int]]:
    """Return this rank's batches to measure on: index on this rank, and number in the run.

    They are odd ones, since factors are fitted to even ones; all if there are no odd ones.
    """
    every = sorted(n for part in block.ranks.gather(list(state.batches)) for n in part)
    odd = [number for number in every if number % 2] or every
    chosen = set(odd[:limit])
    return [(index, number) for index, number in enumerate(state.batches) if number in chosen]


@contextlib.contextmanager
def as_stored(
    block: Block,
    pair: Pair,
    state: BalancingState,
    candidate: Folded,
    outputs: Mapping[int, torch.Tensor],
) -> Iterator[None]:
    """Let a block compute with a pair as it would be stored."""
    squares: dict[str, tuple[torch.Tensor, int]] = {}
    roundings: dict[str, Rounding] = {}
    for statistics, names in state.statistics(pair):
        rows = statistics.halves(block.device)[0] / candidate.columns
        squares |= dict.fromkeys(names, (rows.square().sum(0), len(rows)))
        assert statistics.smallest is not None and statistics.largest is not None
        ranges = torch.stack([statistics.smallest, statistics.largest]).float()
        for name in names:
            rounding = rounded_inputs(block.within[name], rows, ranges / candidate.columns)
            if rounding is not None:
                roundings[name] = rounding
    dtype = next((each.dtype for each in outputs.values()), torch.float32)
    weights = {
        name.removesuffix(".weight"): value
        for name, value in candidate.tensors.items()
        if name.endswith(".weight")
    }
    rounded = rounded_weights(block.within, weights, squares)
    changed = {name: value.to(dtype) for name, value in candidate.tensors.items()}
    changed |= {f"{name}.weight": value.to(dtype) for name, value in rounded.items()}
    with replaced_tensors(block, changed), contextlib.ExitStack() as hooks:
        for name, rounding in roundings.items():
            hook = partial(_rounded_call, rounding)
            hooks.callback(block.within[name].register_forward_pre_hook(hook).remove)
        yield


def _rounded_call(rounding: Rounding, _module: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounding(args[0]), *args[1:])
