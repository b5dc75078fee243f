"""Use an algorithm of your own, with a modifier for its options.

This one sets the smallest weights of each matrix to zero before they are quantized.
docs/writing-an-algorithm.md shows one that observes data.
"""

from typing import ClassVar

from pydantic import Field

from steelyard import oneshot
from steelyard.algorithms import Algorithm
from steelyard.demo import model_folder
from steelyard.modifiers import Modifier, QuantizationModifier


@Modifier.register("ExamplePruningModifier")
class ExamplePruningModifier(Modifier):
    """Set the smallest weights to zero."""

    algorithm: ClassVar[str] = "example_pruning"

    targets: list[str] = Field(default_factory=lambda: ["re:.*mlp.*_proj$"])
    fraction: float = Field(default=0.1, ge=0, lt=1, description="weights to set to zero")


@Algorithm.register("example_pruning")
class ExamplePruning(Algorithm):
    def transform(self, block, state):
        for module in block.modules:
            weight = block.tensor(f"{module}.weight")
            size = weight.float().abs()
            bound = size.flatten().kthvalue(max(1, int(self.modifier.fraction * size.numel())))
            block.change(f"{module}.weight", weight * (size > bound.values))


recipe = [
    ExamplePruningModifier(fraction=0.1),
    QuantizationModifier(scheme="W4A16", ignore=["lm_head"]),
]
result = oneshot(model_folder(), recipe, output_dir="pruned")
print("\n".join(note for note in result.notes if "ExamplePruning" in note))
