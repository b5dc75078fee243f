"""Gather importance, E[x^2] of every input channel, for the weight observers that use it."""

from __future__ import annotations

from pydantic import Field

from steelyard.modifiers.base import Modifier
from steelyard.modifiers.targets import Target

__all__ = ["IMatrixGatherer"]


@Modifier.register("IMatrixGatherer")
class IMatrixGatherer(Modifier):
    """Let calibration data flow, so that `optimal` and `imatrix_mse` can weigh the columns.

    The observers gather for themselves, in the pass that runs anyway; this modifier asks for that
    pass where the scheme alone would need no data.
    """

    ignore: list[Target] = Field(default_factory=lambda: ["lm_head"])

    @property
    def needs_data(self) -> bool:
        return True
