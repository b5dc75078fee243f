"""The range with the least squared error of all values observed."""

from __future__ import annotations

import torch

from steelyard.kernels.range_costs import squared_errors
from steelyard.observers.base import Observer
from steelyard.observers.histogram_search import HistogramSearch

__all__ = ["HistogramMSEObserver"]


@Observer.register("histogram_mse")
class HistogramMSEObserver(HistogramSearch):
    """The range with the least squared error of all values, from a histogram."""

    def costs(
        self,
        counts: torch.Tensor,
        unit: torch.Tensor,
        zero_point: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        return squared_errors(counts, unit, zero_point, self.args)
