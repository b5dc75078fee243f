"""Options of AutoRound, which tunes the rounding of a whole block by its output.

    AutoRoundModifier(scheme="W4A16", ignore=["lm_head"], iters=200)

It begins with the result of GPTQ, so all options of `GPTQModifier` apply.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, field_validator

from steelyard.modifiers.gptq import GPTQModifier
from steelyard.modifiers.modifier import Modifier

__all__ = ["AutoRoundModifier", "fix_batch_if_needed"]

__path__: list[str] = []  # llm-compressor has a part `utils` here, see `aliases`


@Modifier.register("AutoRoundModifier")
class AutoRoundModifier(GPTQModifier):
    """Quantize weights with GPTQ, then tune codes and scales of each block by gradients.

    The tuned block is kept only where it is better on samples that it was not tuned with.
    """

    algorithm: ClassVar[str] = "autoround"

    iters: int = Field(default=200, ge=0, description="steps for each block; 0 is GPTQ alone")
    lr: float | None = Field(
        default=None, gt=0, description="first step of rounding offsets, then down to 0; 1 / iters"
    )
    minmax_lr: float | None = Field(
        default=None, gt=0, description="first step of scale factors; a tenth of lr"
    )
    enable_minmax_tuning: bool = Field(default=True, description="tune scales, too")
    batch_size: int = Field(default=8, ge=1, description="samples for each step")
    seed: int = Field(default=42, description="of the order of samples")
    enable_torch_compile: bool = Field(
        default=True, description="for recipes of llm-compressor; nothing is compiled, either way"
    )
    device_ids: str | None = Field(
        default=None, description="for recipes of llm-compressor; `device` of oneshot decides"
    )
    disable_opt_rtn: bool = Field(default=False, description="not supported: GPTQ is the start")

    @field_validator("disable_opt_rtn")
    @classmethod
    def _refused(cls, value: bool) -> bool:
        if value:
            raise ValueError(
                "tuning starts from GPTQ's codes, never from rounding to nearest; remove the option"
            )
        return value


def fix_batch_if_needed(row: Any) -> Any:
    """Return a row unchanged: masks of padding need no change here."""
    return row
