"""Options of a bit budget: the schemes of a recipe's quantizing step, chosen module by module.

[BitBudgetModifier(bits=4.5), GPTQModifier(scheme="W4A16", ignore=["lm_head"])]
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator, model_validator

from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["UNQUANTIZED", "BitBudgetModifier"]

UNQUANTIZED = 16  # in `bit_widths`


@Modifier.register("BitBudgetModifier")
class BitBudgetModifier(Modifier):
    """Give the modules that the model is most sensitive to more bits, within an average.

    The other step of the recipe that quantizes says how: its scheme, its targets, its algorithm.
    The schemes are chosen before the run, which then gets them as config groups of that step.
    """

    chooses_schemes: ClassVar[bool] = True

    targets: list[Target] = Field(
        default_factory=lambda: ["re:.*"], description="modules whose scheme may change"
    )
    bits: float | None = Field(
        default=None,
        gt=0,
        description="bits of a weight on average, at most; scales are not counted. Also avg_bits",
    )
    max_kl: float | None = Field(
        default=None,
        gt=0,
        description="the fewest bits with this KL divergence, instead of bits; needs data",
    )
    bit_widths: list[int] | None = Field(
        default=None,
        description="bits that a weight may have, 2 to 8, and 16 for unquantized; default: those "
        "of the scheme, 8 and 16, and for symmetric integers up to 6. vLLM serves 2, 3, 5, 6 and 7 "
        "bits on CUDA alone",
    )

    @model_validator(mode="before")
    @classmethod
    def _average(cls, data: Any) -> Any:
        """Accept `avg_bits`, AutoRound's name of `bits`."""
        if isinstance(data, dict) and "avg_bits" in data and "bits" not in data:
            data = {("bits" if key == "avg_bits" else key): v for key, v in data.items()}
        return data

    @field_validator("bit_widths")
    @classmethod
    def _can_be_stored(cls, value: list[int] | None) -> list[int] | None:
        for bits in value or ():
            if not 2 <= bits <= 8 and bits != UNQUANTIZED:
                raise ValueError(f"{bits} is not 2 to 8, or {UNQUANTIZED} for unquantized")
        if value is not None and len(set(value)) < 2:
            raise ValueError("give two different widths or more, else there is nothing to choose")
        return None if value is None else sorted(set(value))

    @model_validator(mode="after")
    def _says_how_much(self) -> BitBudgetModifier:
        if (self.bits is None) == (self.max_kl is None):
            raise ValueError("give one of bits and max_kl")
        return self
