"""The range that changes the distribution of the values least."""

from __future__ import annotations

import torch

from steelyard.kernels.range_costs import divergences
from steelyard.observers.base import Observer
from steelyard.observers.histogram_search import HistogramSearch

__all__ = ["EntropyObserver"]


@Observer.register("entropy")
class EntropyObserver(HistogramSearch):
    """The range whose codes have the least KL divergence from the values, from a histogram."""

    def costs(
        self,
        counts: torch.Tensor,
        unit: torch.Tensor,
        zero_point: torch.Tensor,
        ends: torch.Tensor,
    ) -> torch.Tensor:
        costs = divergences(counts, unit, zero_point, ends, self.args)
        # with fewer bins than codes, rounding would cost nothing, and any range would do
        coarse = ends[1] - ends[0] < 2**self.args.num_bits
        coarse[:, 0] = False
        return costs.masked_fill(coarse, torch.finfo(costs.dtype).max)
