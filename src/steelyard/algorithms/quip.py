"""QuIP (Chee et al. 2023, Tseng et al. 2024) with Hadamard matrices: y = (W Q) (Q^T x).

The weights are stored rotated, and a server rotates inputs or outputs while the model runs.
"""

from __future__ import annotations

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.rotated_parts import add_served
from steelyard.model.rewrites import Rewrites
from steelyard.model.source import Source
from steelyard.modifiers.quip import QuIPModifier

__all__ = ["QuIP"]


@Algorithm.register("quip")
class QuIP(Algorithm):
    """Rotates the weights of the modules that a server rotates the inputs or outputs of."""

    modifier: QuIPModifier

    def rewrite(self, source: Source, notes: list[str]) -> Rewrites:
        rewrites = Rewrites()
        for rotation in self.modifier.served_rotations():
            add_served(rewrites, source.model, rotation)
        return rewrites
