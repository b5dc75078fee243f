"""Options that all modifiers have which balance pairs of a source and its readers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field, field_validator

from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["AWQMapping", "BalancingModifier"]


class AWQMapping(BaseModel):
    """A source, and the layers that read its output."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    smooth_layer: Target
    balance_layers: list[Target] = Field(min_length=1)
    activation_hook_target: str | None = None

    @field_validator("activation_hook_target")
    @classmethod
    def _is_not_needed(cls, value: str | None) -> None:
        if value is not None:
            raise ValueError(
                "has no effect here, since inputs are observed at the readers: omit it"
            )

    def __init__(self, *names: Any, **options: Any) -> None:
        """Accept the fields in order, too: AWQMapping("re:.*norm", ["re:.*q_proj"])."""
        super().__init__(**dict(zip(type(self).model_fields, names, strict=False)), **options)


class BalancingModifier(Modifier):
    """The base of modifiers that balance pairs; not registered."""

    mappings: list[AWQMapping] | None = Field(
        default=None,
        description="patterns of each source and its readers; without it they are found",
    )
    num_calibration_steps: int | None = Field(
        default=None, ge=1, description="batches to observe; all by default"
    )

    @field_validator("mappings", mode="before")
    @classmethod
    def _in_either_form(cls, value: Any) -> Any:
        """Accept [[readers, source], ...] and {smooth_layer: ..., balance_layers: ...}."""
        if not isinstance(value, (list, tuple)):
            return value
        return [_mapping(each) for each in value]

    @property
    def sample_device(self) -> torch.device | None:
        """The device of sampled inputs; None for that of the model."""
        return None

    def patterns_of_pairs(self) -> list[tuple[str, list[str]]] | None:
        """Return the patterns of sources, each with those of its readers; None to find pairs."""
        if self.mappings is None:
            return None
        return [(each.smooth_layer, each.balance_layers) for each in self.mappings]


def _mapping(given: Any) -> Any:
    if isinstance(given, (AWQMapping, Mapping)) or not isinstance(given, (list, tuple)):
        return given
    if len(given) != 2:
        return given
    readers, source = given
    if isinstance(readers, str) and isinstance(source, (list, tuple)):  # an AWQMapping's order
        readers, source = source, readers
    source = source[0] if isinstance(source, (list, tuple)) and len(source) == 1 else source
    readers = [readers] if isinstance(readers, str) else list(readers)
    return {"smooth_layer": source, "balance_layers": readers}
