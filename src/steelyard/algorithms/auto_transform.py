"""Chooses between no transform, SmoothQuant and AWQ for each pair, by the error of the block."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.awq import best_factor
from steelyard.algorithms.balancing import Balancing, BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.factor_choice import best_of
from steelyard.algorithms.pair_error import all_adapted, is_measurable
from steelyard.algorithms.pairs import Pair
from steelyard.algorithms.smoothing import largest_weights, smoothed
from steelyard.modifiers.auto_transform import TransformModifier
from steelyard.plan.plan import Plan

__all__ = ["AutoTransform"]

_STRENGTHS = (0.5, 0.7, 0.85, 1.0)  # of SmoothQuant


@Algorithm.register("auto_transform")
class AutoTransform(Balancing):
    """Folds the factor into each pair with which the block's output has the least error."""

    modifier: TransformModifier

    def idle(self, plan: Plan, adapted: Collection[int]) -> str | None:
        return all_adapted(plan, adapted)

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        if not is_measurable(block, pair, state):
            return None
        factors = list(self._candidates(block, pair, state))
        judged = [each for each, _ in factors]
        best = best_of(block, pair, state, judged, self.modifier.batches) if factors else None
        return None if best is None else factors[best][1]

    def _candidates(
        self, block: Block, pair: Pair, state: BalancingState
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield each factor as it is judged, made from even batches, and from all batches."""
        even, every = (state.magnitudes(pair, only) for only in (True, False))
        which = self.modifier.transform
        if even is None or every is None:
            return
        if which in ("auto", "smoothquant"):
            weights = largest_weights(block, pair)
            for strength in _STRENGTHS:
                yield smoothed(even, weights, strength), smoothed(every, weights, strength)
        if which in ("auto", "awq"):
            found = best_factor(block, pair, state, self.modifier.n_grid, "both")
            if found is not None:
                yield found[0], found[0]
