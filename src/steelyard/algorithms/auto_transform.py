"""Chooses between no transform, SmoothQuant and AWQ for each pair, by the error of the block."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.awq import best_factor
from steelyard.algorithms.balancing import Balancing, BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.block_error import best_of
from steelyard.algorithms.pair_error import is_measurable
from steelyard.algorithms.pairs import Pair
from steelyard.algorithms.smoothing import largest_weights, smoothed
from steelyard.modifiers.auto_transform import TransformModifier

__all__ = ["AutoTransform"]

_STRENGTHS = (0.5, 0.7, 0.85, 1.0)  # of SmoothQuant


@Algorithm.register("auto_transform")
class AutoTransform(Balancing):
    """Folds the factor into each pair with which the block's output has the least error."""

    modifier: TransformModifier

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        if not is_measurable(block, pair, state):
            return None
        factors = list(self._candidates(block, pair, state))
        return best_of(block, pair, state, factors, self.modifier.batches) if factors else None

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
