"""What an algorithm asks the engine for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steelyard.algorithms.algorithm import Algorithm

__all__ = ["Needs", "needs_data"]


@dataclass(frozen=True)
class Needs:
    """The inputs of an algorithm, besides the weights of a block."""

    inputs: bool = False
    """`see` gets the input of each module, as the place "input"."""
    outputs: bool = False
    """`see` gets the output of each module, as the place "output"."""
    attention: bool = False
    """`see` gets the states of each attention module, as the places "query", "key" and "value"."""
    calls: bool = False
    """`see` gets all arguments of each call of a module, as the place "call"."""
    originals: bool = False
    """`block.originals` holds the hidden states of the unquantized model for each batch."""
    original_inputs: bool = False
    """`see` gets with the input of a module its input in the unquantized model (`Seen.original`).
    Only where modules are solved in stages, in models without experts; None elsewhere."""
    token_weights: bool = False
    """`see` gets the weights of tokens (`Seen.weights`) with the inputs of modules whose outputs
    stay with their token, and which are not rounded to few bits. Only where modules are solved in
    stages."""
    gradients: bool = False
    """`transform` and `solve` run with gradients enabled, and `solve` may call `block.forward`."""
    tuning: bool = False
    """`tune` is called once all modules of a block are solved; it may call `block.forward`."""
    activations: bool = False
    """The schemes have static activation scales, which observers compute."""
    importance: bool = False
    """E[x^2] of each input channel, from calibration data or from a file."""
    passes: int = 1
    """Number of passes of the batches through the block before `transform` and `solve`."""
    staged: bool = False
    """Modules are solved in the order of their calls; each sees the solved ones before it."""
    layers: bool = False
    """Blocks are layers: `begin` and `transform` may call `block.forward` for one layer, and are
    not called for the modules outside of layers."""
    propagate: bool = False
    """Each block gets the output of the quantized blocks before it."""
    samples: bool = False
    """`finish` gets the calibration samples."""

    @property
    def data(self) -> bool:
        """Whether calibration data must run through the model, even if files hold importance."""
        seen = self.inputs or self.outputs or self.attention or self.calls
        differentiates = self.gradients or self.tuning
        return seen or self.originals or differentiates or self.activations or self.samples

    @property
    def blocks(self) -> bool:
        """Whether the algorithm works on one layer at a time, not on the model as a whole."""
        return self.originals or self.gradients or self.layers or self.tuning

    @property
    def precisely(self) -> bool:
        """Whether it compares outputs that may differ less than products in bf16 do from exact
        ones: a tuned block differs from the original by what rounding to fewer bits leaves."""
        return self.blocks and not self.tuning

    @property
    def sees(self) -> bool:
        return self.inputs or self.outputs or self.attention or self.calls


def needs_data(algorithms: Sequence[Algorithm]) -> bool:
    """Return whether calibration data is needed; importance may come from a file instead."""
    needs = [algorithm.needs for algorithm in algorithms]
    given = any(algorithm.gives_importance for algorithm in algorithms)
    return any(each.data or (each.importance and not given) for each in needs)
