"""The range with the least error of all values observed."""

from __future__ import annotations

import torch
from pydantic import Field

from steelyard.kernels.range_costs import errors_of
from steelyard.observers.base import Observer
from steelyard.observers.histogram_search import HistogramSearch
from steelyard.observers.observer_options import ActivationOptions

__all__ = ["HistogramMSEObserver"]


class HistogramMSEOptions(ActivationOptions):
    """Options of `histogram_mse`."""

    norm: float = Field(
        default=2.0, ge=1, le=8, description="power to which errors are raised, 1 to 8"
    )


@Observer.register("histogram")
@Observer.register("histogram_mse")
class HistogramMSEObserver(HistogramSearch):
    """The range with the least squared error of all values, from a histogram."""

    Options = HistogramMSEOptions

    def costs(
        self,
        counts: torch.Tensor,
        unit: torch.Tensor,
        zero_point: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        return errors_of(counts, unit, zero_point, self.args, float(self.options.norm))
