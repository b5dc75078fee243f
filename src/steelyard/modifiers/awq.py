"""Options of AWQ, which scales weights of large inputs up before they are rounded.

    [AWQModifier(), QuantizationModifier(scheme="W4A16", ignore=["lm_head"])]
    AWQModifier(scheme="W4A16", ignore=["lm_head"])

The second form is short for the first.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from compressed_tensors.quantization import QuantizationConfig
from pydantic import Field, field_validator

from steelyard.modifiers.balancing import AWQMapping, BalancingModifier
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.nearest import QuantizationModifier

__all__ = ["AWQMapping", "AWQModifier"]

_OWN = ("mappings", "num_calibration_steps", "offload_device", "duo_scaling", "n_grid")


@Modifier.register("AWQModifier")
class AWQModifier(BalancingModifier, QuantizationModifier):
    """Search the factors of each pair that make its layers lose least as they are stored.

    With `scheme` or `config_groups` it also quantizes, as a `QuantizationModifier` after it would.
    """

    algorithm: ClassVar[str] = "awq"

    duo_scaling: bool | Literal["both"] = Field(
        default=True, description="factors from inputs and weights, not inputs alone; or try both"
    )
    n_grid: int = Field(default=20, ge=2, description="number of candidates for each pair")
    offload_device: str | None = Field(
        default=None, description="keeps the sampled inputs, such as cpu; by default the model's"
    )

    @field_validator("offload_device", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return str(value) if isinstance(value, torch.device) else value

    @field_validator("offload_device")
    @classmethod
    def _is_a_device(cls, value: str | None) -> str | None:
        try:
            return None if value is None else str(torch.device(value))
        except RuntimeError as error:
            raise ValueError(f"is no device: {str(error).splitlines()[0]}") from None

    def _says_how(self) -> None:
        if self._quantizes:
            super()._says_how()

    @property
    def _quantizes(self) -> bool:
        return any(
            each is not None for each in (self.scheme, self.config_groups, self.kv_cache_scheme)
        )

    @property
    def sample_device(self) -> torch.device | None:
        return None if self.offload_device is None else torch.device(self.offload_device)

    def quantization_config(self) -> QuantizationConfig | None:
        return None

    def steps(self) -> list[Modifier]:
        if not self._quantizes:
            return [self]
        given = {name: getattr(self, name) for name in self.model_fields_set}
        own = {n: value for n, value in given.items() if n in (*_OWN, "targets", "ignore")}
        rest = {n: value for n, value in given.items() if n not in _OWN}
        return [AWQModifier(**own), QuantizationModifier(**rest)]
