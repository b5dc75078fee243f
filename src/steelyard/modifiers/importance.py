"""Gather importance, E[x^2] of every input channel, for the weight observers that use it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from compressed_tensors.utils.match import is_match
from pydantic import Field, field_validator
from torch.nn import Module

from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["IMatrixGatherer", "gatherers_in"]


@Modifier.register("IMatrixGatherer")
class IMatrixGatherer(Modifier):
    """Let calibration data flow, so that `optimal` and `imatrix_mse` can weigh the columns.

    The observers gather for themselves, in the pass that runs anyway; this modifier asks for that
    pass where the scheme alone would need no data. With `load_from` no data is needed.
    """

    ignore: list[Target] = Field(default_factory=lambda: ["lm_head"])
    load_from: list[str] = Field(
        default_factory=list,
        description="files to take importance from, added up: our own, or llama.cpp's GGUF",
    )
    save_to: str | None = Field(default=None, description="a file for what was gathered")

    @field_validator("load_from", mode="before")
    @classmethod
    def _one_file_is_a_list(cls, value: Any) -> Any:
        return [str(value)] if isinstance(value, (str, Path)) else value

    @property
    def needs_data(self) -> bool:
        return not self.load_from

    def covers(self, name: str, module: Module) -> bool:
        """Whether a module is among those that gather."""
        return bool(is_match(name, module, self.targets, self.ignore))


def gatherers_in(modifiers: Iterable[Modifier]) -> list[IMatrixGatherer]:
    return [modifier for modifier in modifiers if isinstance(modifier, IMatrixGatherer)]
