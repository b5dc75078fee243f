"""Options of the choice between transforms: measure each of them, and take the best.

[TransformModifier(transform="auto"), QuantizationModifier(scheme="W8A8")]
"""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from steelyard.modifiers.balancing import BalancingModifier
from steelyard.modifiers.modifier import Modifier

__all__ = ["TransformModifier"]


@Modifier.register("TransformModifier")
class TransformModifier(BalancingModifier):
    """Balance each pair by SmoothQuant or AWQ if that lowers the error of the block's output.

    The output is measured with the pair as it would be stored, on batches that the factors were not
    chosen on.
    """

    algorithm: ClassVar[str] = "auto_transform"

    transform: Literal["auto", "smoothquant", "awq"] = Field(
        default="auto", description="what to measure besides no transform; auto: both"
    )
    n_grid: int = Field(default=10, ge=2, description="candidates of AWQ for each pair")
    batches: int = Field(default=4, ge=1, description="batches to measure the block's output on")
