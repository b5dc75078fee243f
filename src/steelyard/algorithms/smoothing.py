"""SmoothQuant and logarithmic equalization: factors from a formula.

SmoothQuant (Xiao et al. 2022):             max|x|^a / max|w|^(1 - a)
Logarithmic equalization (Li et al. 2023):  max|x| / log2(2 + max|x|)
"""

from __future__ import annotations

import torch

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.balancing import Balancing, BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.pairs import Pair
from steelyard.modifiers.smoothing import SmoothQuantModifier

__all__ = ["SmoothQuant", "equalized", "largest_weights", "smoothed"]

_SMALLEST = 1e-5  # factor, and magnitude in its computation


@Algorithm.register("smoothquant")
class SmoothQuant(Balancing):
    """Folds the factors of a formula into every pair."""

    modifier: SmoothQuantModifier

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        inputs = state.magnitudes(pair)
        if inputs is None:
            return None
        if self.modifier.formula == "log_equalization":
            return equalized(inputs)
        return smoothed(inputs, largest_weights(block, pair), self.modifier.smoothing_strength)


def largest_weights(block: Block, pair: Pair) -> torch.Tensor:
    """Return max|w| of the columns that each factor multiplies, over all readers: (size,)."""
    columns = [block.tensor(f"{name}.weight").float().abs().amax(0) for name in pair.readers]
    return pair.largest(torch.stack(columns).amax(0))


def smoothed(inputs: torch.Tensor, weights: torch.Tensor, strength: float) -> torch.Tensor:
    """Return SmoothQuant's factors; 1 where an input or its weights are all zero."""
    factor = inputs.pow(strength) / weights.clamp(min=_SMALLEST).pow(1 - strength)
    return _usable(factor, (inputs > 0) & (weights > 0))


def equalized(inputs: torch.Tensor) -> torch.Tensor:
    """Return the factors of logarithmic equalization; 1 where an input is all zero."""
    return _usable(inputs / torch.log2(2 + inputs), inputs > 0)


def _usable(factor: torch.Tensor, known: torch.Tensor) -> torch.Tensor:
    known = known & factor.isfinite()
    return torch.where(known, factor.clamp(min=_SMALLEST), torch.ones_like(factor))
