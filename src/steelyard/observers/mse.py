"""Ranges that reconstruct the value with the least error, found on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, model_validator

from steelyard.kernels.grid_search import search_range, shrink_factors
from steelyard.kernels.qparams import scale_dtype_of
from steelyard.observers.base import Observer, reads_blocks
from steelyard.observers.combine import IN_ORDER
from steelyard.observers.moving_average import MovingAverageObserver, MovingAverageOptions
from steelyard.observers.observer_options import ObserverOptions
from steelyard.observers.search import KeepsWeight, SearchObserver

__all__ = [
    "GridSearchObserver",
    "MemorylessMSEObserver",
    "MovingAverageMSEObserver",
    "SearchOptions",
]


class SearchOptions(ObserverOptions):
    """Options of the shrink-grid search."""

    maxshrink: float = Field(
        default=0.20, ge=0, le=1, description="largest fraction of the range to cut off"
    )
    patience: int = Field(
        default=5,
        ge=0,
        description="stop after this many steps in which no group of the tensor improved; 0: never",
    )
    grid: float = Field(
        default=100.0, gt=0, allow_inf_nan=False, description="steps that divide the range"
    )
    norm: float = Field(
        default=2.4, gt=0, allow_inf_nan=False, description="power to which errors are raised"
    )
    expand: float = Field(
        default=1.0,
        ge=1,
        allow_inf_nan=False,
        description="start the search at this multiple of the range",
    )

    @model_validator(mode="after")
    def _has_candidates(self) -> SearchOptions:
        shrink_factors(self.maxshrink, self.grid)
        return self


class GridSearchObserver(SearchObserver):
    """Base of observers that search the shrink grid; options as attributes."""

    Options: ClassVar[type[ObserverOptions] | None] = SearchOptions

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.maxshrink: float = self.options.maxshrink
        self.patience: int = self.options.patience
        self.grid: float = self.options.grid
        self.norm: float = self.options.norm
        self.expand: float = self.options.expand

    def factors(self) -> Sequence[float]:
        """Return the multiples of the observed range to try, the range itself first."""
        grown = [self.expand * factor for factor in shrink_factors(self.maxshrink, self.grid)]
        return grown if self.expand == 1 else [1.0, *grown]

    def search(
        self,
        observed: torch.Tensor,
        global_scale: torch.Tensor | None,
        importance: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best range of `observed`, (*qparam_shape) each.

        It reuses the memory of the observed range.
        """
        observed_range = self.range_of(observed)
        self._checked = None
        return search_range(
            observed,
            self.args,
            scale_dtype_of(self.args, self.observed_dtype or observed.dtype),
            self.factors(),
            self.norm,
            self.patience,
            importance,
            global_scale,
            observed_range,
            self.group_dims(observed),
            in_place=True,
        )


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(GridSearchObserver, KeepsWeight):
    """The best range of the last value observed."""

    suits = "weights"
    seconds_per_weight = 12e-9

    def remember(self, observed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        self.min_vals, self.max_vals = first, second

    def chosen_range(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        again = self.searched_again(global_scale)
        return (self.min_vals, self.max_vals) if again is None else again


@Observer.register("mse")
class MovingAverageMSEObserver(GridSearchObserver, MovingAverageObserver):
    """A moving average of the best ranges of the values observed."""

    suits = "activations"
    seconds_per_weight = 12e-9

    class Options(SearchOptions, MovingAverageOptions):
        """Options of the search and of the average."""

    _statistics: ClassVar[tuple[str, ...]] = SearchObserver._statistics
    _averaged: ClassVar[tuple[str, ...]] = _statistics
    _act_sync_dict: ClassVar = {f"{name}_history": IN_ORDER for name in _averaged}

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        absmax = self.own_absmax(observed)
        low, high = self.search(observed, self.own_global_scale(absmax), None)
        self.average(min_vals=low, max_vals=high, absmax=absmax)
