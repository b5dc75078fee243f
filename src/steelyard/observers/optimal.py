"""The best scale that can be stored, found exactly: see kernels/optimal_search.py."""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from steelyard.kernels.optimal_search import optimal_qparams
from steelyard.kernels.qparams import scale_dtype_of
from steelyard.observers.base import Observer
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.observer_options import ObserverOptions
from steelyard.observers.search import KeepsWeight

__all__ = ["OptimalObserver", "OptimalOptions"]

# With importance, the sum of weighted squares is the output's error, as far as inputs are
# uncorrelated. Without, a larger power takes its place: it keeps outliers, whose columns tend to
# matter, and had the lower KL divergence (benchmarks/README.md).
_NORM_WITH_IMPORTANCE, _NORM_WITHOUT = 2.0, 3.0


class OptimalOptions(ObserverOptions):
    """Options of the exact search."""

    norm: float | None = Field(
        default=None,
        ge=1,
        le=8,
        description="power to which errors are raised; None for 2 with importance, 3 without",
    )
    negative_scales: bool = Field(
        default=False,
        description="let symmetric integer scales be negative, so that the extra negative code "
        "can extend either side of the range",
    )
    importance_power: float | None = Field(
        default=None,
        ge=0,
        le=1,
        description="power of E[x^2] that weights a column; None for 1, and for 0.5 in GPTQ, whose "
        "later columns make up for errors of earlier ones",
    )
    strict: bool = Field(
        default=False, description="raise on unusable importance instead of searching without it"
    )


@Observer.register("optimal")
class OptimalObserver(ImportanceObserver, KeepsWeight):
    """The storable scale with the least error: cubes, or squares weighted by E[x^2] if gathered."""

    suits = "weights"
    seconds_per_weight = 14e-9

    Options = OptimalOptions
    needs_importance: ClassVar[bool] = False

    _statistics: ClassVar[tuple[str, ...]] = (
        "min_vals",
        "max_vals",
        "absmax",
        "best_scale",
        "best_zero_point",
    )

    best_scale: torch.Tensor
    best_zero_point: torch.Tensor

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        power = self.options.importance_power
        self.power = 1.0 if power is None else power

    def remember(self, observed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        self.min_vals, self.max_vals = self.range_of(observed)
        self.best_scale, self.best_zero_point = first, second

    def search(
        self,
        observed: torch.Tensor,
        global_scale: torch.Tensor | None,
        importance: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return optimal_qparams(
            observed,
            self.args,
            scale_dtype_of(self.args, self.observed_dtype or observed.dtype),
            importance,
            global_scale,
            self.range_of(observed),
            self.options.negative_scales,
            self.group_dims(observed),
            norm=self.norm_for(importance),
        )

    def norm_for(self, importance: torch.Tensor | None) -> float:
        """Return the power to which errors are raised."""
        if self.options.norm is not None:
            return float(self.options.norm)
        return _NORM_WITHOUT if importance is None else _NORM_WITH_IMPORTANCE

    def compute_qparams(
        self, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        again = self.searched_again(global_scale)
        if again is not None:
            return again
        return self.best_scale.clone(), self.best_zero_point.clone()
