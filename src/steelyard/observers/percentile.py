"""The range that holds a given percentage of all values observed."""

from __future__ import annotations

import torch
from pydantic import Field

from steelyard.kernels.bin_counts import BINS
from steelyard.observers.base import Observer
from steelyard.observers.histogram_base import HistogramObserver
from steelyard.observers.observer_options import ActivationOptions

__all__ = ["PercentileObserver"]

_HALF = BINS // 2


class PercentileOptions(ActivationOptions):
    """Options of `percentile`."""

    percentile: float = Field(
        default=99.99, gt=0, le=100, description="values that the range must hold, in percent"
    )


@Observer.register("percentile")
class PercentileObserver(HistogramObserver):
    """The range that holds 99.99 percent of all values, or another share, from a histogram.

    Symmetric types count magnitudes; with a zero point, half of the rest is cut off at each end.
    """

    Options = PercentileOptions

    def choose(
        self,
        counts: torch.Tensor,
        exponent: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        width = torch.ldexp(torch.ones_like(exponent, dtype=torch.float64), exponent)
        cut = counts.sum(-1, keepdim=True) * (1 - float(self.options.percentile) / 100)
        below, above = counts[:, :_HALF].flip(-1), counts[:, _HALF:]  # from zero outwards
        if self.args.symmetric:
            high = torch.maximum(-low, high)
            edge = torch.minimum((_edge(below + above, cut) * width).to(high.dtype), high)
            return -edge, edge
        return (
            torch.maximum((-_edge(below, cut / 2) * width).to(low.dtype), low),
            torch.minimum((_edge(above, cut / 2) * width).to(high.dtype), high),
        )


def _edge(counts: torch.Tensor, cut: torch.Tensor) -> torch.Tensor:
    """Return the first edge with at most `cut` values beyond it.

    counts: (num_qparams, BINS / 2) int64, from zero outwards
    """
    beyond = counts.sum(-1, keepdim=True) - torch.nn.functional.pad(counts.cumsum(-1), (1, 0))
    return (beyond <= cut).int().argmax(-1)
