"""What a run found for one module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from steelyard.distributed import sendable

__all__ = ["ModuleResult"]


@sendable
@dataclass(frozen=True)
class ModuleResult:
    """What became of one module.

    error:   squared error of the stored weight, over the sum of squares of the weight
    tokens:  how many calibration tokens reached it
    details: what an algorithm tells beyond that, in JSON's types; under "figures" what a report
             shows (`steelyard.checkpoint.figures`)
    """

    error: float | None
    tokens: int
    details: dict[str, Any] = field(default_factory=dict)
