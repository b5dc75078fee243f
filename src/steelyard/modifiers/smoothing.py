"""Options of SmoothQuant, which moves outliers of activations into the weights.

[SmoothQuantModifier(smoothing_strength=0.8), QuantizationModifier(scheme="W8A8")]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from steelyard.modifiers.balancing import BalancingModifier
from steelyard.modifiers.modifier import Modifier

__all__ = ["LogarithmicEqualizationModifier", "SmoothQuantModifier"]


@Modifier.register("SmoothQuantModifier")
class SmoothQuantModifier(BalancingModifier):
    """Divide inputs by a factor for each channel, and multiply the weights that read them by it.

    factor = max|x|^strength / max|w|^(1 - strength)
    """

    algorithm: ClassVar[str] = "smoothquant"

    smoothing_strength: float = Field(
        default=0.5, ge=0, le=1, description="1 moves outliers by inputs alone, 0 by weights alone"
    )
    formula: Literal["smoothquant", "log_equalization"] = Field(
        default="smoothquant",
        description="log_equalization: max|x| / log2(2 + max|x|), without the strength; "
        "llm-compressor calls this option `algorithm`",
    )

    @model_validator(mode="before")
    @classmethod
    def _formula_by_its_other_name(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and "algorithm" in data and "formula" not in data:
            rest = {key: value for key, value in data.items() if key != "algorithm"}
            return {**rest, "formula": data["algorithm"]}
        return data


@Modifier.register("LogarithmicEqualizationModifier")
class LogarithmicEqualizationModifier(BalancingModifier):
    """Divide inputs by max|x| / log2(2 + max|x|) of each channel, and multiply weights by it."""

    algorithm: ClassVar[str] = "smoothquant"

    formula: ClassVar[str] = "log_equalization"
    smoothing_strength: ClassVar[float] = 0.5
