"""Searches that also try ranges above the observed one.

FP4 has a gap between 4 and 6: a larger range can move a group's largest value from 6 to 4, and so
reduce the error of all others. The defaults are those of llm-compressor: from 1.8 times the
observed range down to 0.8 times, in 111 steps.
"""

from __future__ import annotations

from pydantic import Field

from steelyard.observers.base import Observer
from steelyard.observers.imatrix import IMatrixMSEObserver, IMatrixOptions
from steelyard.observers.mse import MemorylessMSEObserver, SearchOptions

__all__ = ["NVFP4ExpandedIMatrixObserver", "NVFP4ExpandedMSEObserver"]

_EXPAND, _MAXSHRINK, _GRID = 1.8, 1 - 0.8 / 1.8, 200.0


class ExpandedOptions(SearchOptions):
    """Options of the search, with a range that starts above the observed one."""

    expand: float = Field(default=_EXPAND, ge=1, allow_inf_nan=False)
    maxshrink: float = Field(default=_MAXSHRINK, ge=0, le=1)
    grid: float = Field(default=_GRID, gt=0, allow_inf_nan=False)
    patience: int = Field(default=0, ge=0)


class ExpandedIMatrixOptions(IMatrixOptions):
    """The same, for the weighted search."""

    expand: float = Field(default=_EXPAND, ge=1, allow_inf_nan=False)
    maxshrink: float = Field(default=_MAXSHRINK, ge=0, le=1)
    grid: float = Field(default=_GRID, gt=0, allow_inf_nan=False)
    norm: float = Field(default=2.4, gt=0, allow_inf_nan=False)
    patience: int = Field(default=0, ge=0)


@Observer.register("nvfp4_expanded_mse")
class NVFP4ExpandedMSEObserver(MemorylessMSEObserver):
    """The best range of the last value observed, also above its own range."""

    suits = "weights in FP4"
    seconds_per_weight = 30e-9

    Options = ExpandedOptions


@Observer.register("nvfp4_expanded_imatrix")
class NVFP4ExpandedIMatrixObserver(IMatrixMSEObserver):
    """The best range of the last weight, also above its own, errors weighted by E[x^2]."""

    suits = "weights in FP4"
    seconds_per_weight = 30e-9

    Options = ExpandedIMatrixOptions
