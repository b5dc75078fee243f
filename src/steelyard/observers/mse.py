"""Ranges that reconstruct the value with the least error, found on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from pydantic import Field, model_validator
from torch import distributed as dist

from steelyard.errors import StatisticsError
from steelyard.kernels.qparams import global_scale_of, scale_dtype_of
from steelyard.kernels.search import search_range, shrink_factors
from steelyard.observers.base import Observer
from steelyard.observers.moving_average import MovingAverageObserver, MovingAverageOptions
from steelyard.observers.options import ObserverOptions

__all__ = [
    "MemorylessMSEObserver",
    "MovingAverageMSEObserver",
    "SearchObserver",
    "SearchOptions",
]


class SearchOptions(ObserverOptions):
    """Options of the shrink-grid search."""

    maxshrink: float = Field(
        default=0.20, ge=0, le=1, description="largest part of the range to give up"
    )
    patience: int = Field(
        default=5,
        ge=0,
        description="stop after this many steps in which no group of the tensor improved; 0: never",
    )
    grid: float = Field(
        default=100.0, gt=0, allow_inf_nan=False, description="steps into which the range is cut"
    )
    norm: float = Field(
        default=2.4, gt=0, allow_inf_nan=False, description="power to which errors are raised"
    )

    @model_validator(mode="after")
    def _has_candidates(self) -> SearchOptions:
        shrink_factors(self.maxshrink, self.grid)
        return self


class SearchObserver(Observer):
    """Base of observers that search: options as attributes, and the search itself."""

    Options: ClassVar[type[ObserverOptions] | None] = SearchOptions

    _statistics: ClassVar[tuple[str, ...]] = ("min_vals", "max_vals", "absmax")

    absmax: torch.Tensor
    """Largest magnitude observed: the global scale belongs to it, not to the shrunk range."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self.maxshrink: float = self.options.maxshrink
        self.patience: int = self.options.patience
        self.grid: float = self.options.grid
        self.norm: float = self.options.norm

    def factors(self) -> Sequence[float]:
        """Return the fractions of the observed range that are tried."""
        return shrink_factors(self.maxshrink, self.grid)

    def search(
        self,
        observed: torch.Tensor,
        global_scale: torch.Tensor | None,
        importance: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the best range of `observed`, (*qparam_shape) each."""
        return search_range(
            observed,
            self.args,
            scale_dtype_of(self.args, self.observed_dtype or observed.dtype),
            self.factors(),
            self.norm,
            self.patience,
            importance,
            global_scale,
            self.range_of(observed),
        )

    def own_absmax(self, observed: torch.Tensor) -> torch.Tensor:
        low, high = self.range_of(observed)
        return torch.maximum(-low.amin(), high.amax()).clamp(min=0)

    def own_global_scale(self, absmax: torch.Tensor) -> torch.Tensor | None:
        return global_scale_of(absmax) if self.args.strategy == "tensor_group" else None

    def global_absmax(self) -> torch.Tensor:
        return self.absmax


@Observer.register("memoryless_mse")
class MemorylessMSEObserver(SearchObserver):
    """The best range of the last value observed."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._kept: _Kept | None = None

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.absmax = self.own_absmax(observed)
        importance = self.importance_for(observed)
        global_scale = self.own_global_scale(self.absmax)
        self.min_vals, self.max_vals = self.search(observed, global_scale, importance)
        # only a fused weight can turn out to need another global scale than its own
        keeps = global_scale is not None and self.base_name == "weight"
        self._kept = _Kept(observed, importance) if keeps else None

    def importance_for(self, observed: torch.Tensor) -> torch.Tensor | None:
        """Return weights that broadcast to `observed`, or None to weigh all values alike."""
        return None

    def chosen_range(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Search again where fusion raised the global scale's range above this weight's own.

        Statistics that came from a file have no weight beside them; their range stays as found.
        """
        if self._kept is None or global_scale is None:
            return self.min_vals, self.max_vals
        if torch.equal(global_scale, global_scale_of(self.absmax)):
            return self.min_vals, self.max_vals
        observed, importance = self._kept.read(self.label)
        return self.search(observed, global_scale, importance)

    def reset(self) -> None:
        super().reset()
        self._kept = None


@Observer.register("mse")
class MovingAverageMSEObserver(SearchObserver, MovingAverageObserver):
    """A moving average of the best ranges of the values observed."""

    class Options(SearchOptions, MovingAverageOptions):
        """The search's options and the average's."""

    _statistics: ClassVar[tuple[str, ...]] = (
        *SearchObserver._statistics,
        "first_min_vals",
        "first_max_vals",
        "first_absmax",
    )
    _act_sync_dict: ClassVar = dict.fromkeys(_statistics, dist.ReduceOp.SUM)

    first_absmax: torch.Tensor

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        absmax = self.own_absmax(observed)
        low, high = self.search(observed, self.own_global_scale(absmax))
        self.average(min_vals=low, max_vals=high, absmax=absmax)


class _Kept:
    """A weight (by reference, not copied) whose search may have to be repeated."""

    def __init__(self, observed: torch.Tensor, importance: torch.Tensor | None) -> None:
        self._observed = observed
        self._importance = importance
        self._version = self._now()

    def read(self, label: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._now() != self._version:
            raise StatisticsError(
                f"{label} was modified after it was observed, and its fused partners call for "
                "another search: ask for parameters before modifying the weight"
            )
        return self._observed, self._importance

    def _now(self) -> int:
        return 0 if self._observed.is_inference() else self._observed._version
