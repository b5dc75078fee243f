"""The shrink-grid search, errors weighted by importance."""

from __future__ import annotations

from pydantic import Field

from steelyard.observers.base import Observer
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.mse import MemorylessMSEObserver, SearchOptions

__all__ = ["IMatrixMSEObserver", "IMatrixOptions"]


class IMatrixOptions(SearchOptions):
    """Options of the weighted search: a wider and coarser grid, and `strict`."""

    maxshrink: float = Field(
        default=0.95, ge=0, le=1, description="largest fraction of the range to cut off"
    )
    grid: float = Field(
        default=20, gt=0, allow_inf_nan=False, description="steps that divide the range"
    )
    norm: float = Field(
        default=3.0, gt=0, allow_inf_nan=False, description="power to which errors are raised"
    )
    strict: bool = Field(
        default=False, description="raise on unusable importance instead of searching without it"
    )


@Observer.register("imatrix_mse")
class IMatrixMSEObserver(ImportanceObserver, MemorylessMSEObserver):
    """The best range of the last weight observed, errors weighted by E[x^2] of their column."""

    suits = "weights"
    seconds_per_weight = 8e-9

    Options = IMatrixOptions
