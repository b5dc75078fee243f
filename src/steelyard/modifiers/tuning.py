"""Options of tuning, which adapts what a quantized model stores besides its codes.

[GPTQModifier(scheme="W4A16", ignore=["lm_head"]), TuningModifier()]
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar

from pydantic import Field

from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["TuningModifier"]


@Modifier.register("TuningModifier")
class TuningModifier(Modifier):
    """Tune scales, norm gains and biases of the quantized model towards the original's outputs.

    Comes last in a recipe. Codes do not change, and neither do types and shapes. Every eighth
    sample is held out: tuning stops when the KL divergence to the original no longer falls there,
    and the checkpoint stays as it was if it did not fall by more than noise.
    """

    algorithm: ClassVar[str] = "tuning"

    targets: list[Target] = Field(
        default_factory=lambda: ["re:.*"], description="modules whose tensors are tuned"
    )
    epochs: int = Field(default=4, ge=1, description="passes over the samples at most")
    lr: float = Field(
        default=3e-4, gt=0, description="learning rate, relative to the size of each tensor"
    )
    batch_size: int = Field(default=4, ge=1, description="samples per step")

    def checks(self, plan: Any, model: Any) -> Iterator[str]:
        """Refuse what gradients do not pass through."""
        if plan.attention:
            yield (
                f"TuningModifier cannot tune {plan.attention[0]} and others with quantized "
                "attention states, which gradients do not pass through: remove TuningModifier, or "
                "the kv_cache_scheme"
            )
        outputs = [p.name for p in plan.quantized if p.scheme.output_activations is not None]
        if outputs:
            yield (
                f"TuningModifier cannot tune {outputs[0]}, whose outputs are quantized: gradients "
                "do not pass through them. Remove TuningModifier, or output_activations"
            )
