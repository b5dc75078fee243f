"""Observers that keep a histogram of all values, and choose a range from it without a second pass.

Each parameter has a histogram of 2,048 bins (`kernels.bin_counts`), 16 KiB however many values it
counts. Histograms join exactly: ranks, threads, files and the order of the data change nothing.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import distributed as dist

from steelyard.errors import StrategyError
from steelyard.kernels.bin_counts import BINS, SMALLEST_EXPONENT, add_values
from steelyard.observers.base import Observer, reads_blocks
from steelyard.observers.combine import HISTOGRAM
from steelyard.observers.observer_options import ActivationOptions

__all__ = ["HistogramObserver", "check_count"]

_MOST_PARAMETERS = 1 << 16  # a GiB of counts
_LARGEST_EXPONENT = 1014  # of fp64
_AT_ONCE = 1024  # histograms for which a range is chosen at once


def check_count(label: str, count: int) -> None:
    """Raise if so many histograms would take too much memory."""
    if count > _MOST_PARAMETERS:
        raise StrategyError(
            f"{label}: {count:,} histograms would take {count * BINS * 8 / 2**30:.0f} GiB; for "
            "weights in groups use optimal or memoryless_mse"
        )


class HistogramObserver(Observer):
    """Base of observers that choose a range from counts.

    min_vals, max_vals: (*qparam_shape), of all values observed
    histogram:          (*qparam_shape, 1 + BINS) int64, the exponent of the width, then the counts
    """

    suits = "activations"
    Options = ActivationOptions

    _act_sync_dict: ClassVar = {
        "min_vals": dist.ReduceOp.MIN,
        "max_vals": dist.ReduceOp.MAX,
        "histogram": HISTOGRAM,
    }

    histogram: torch.Tensor

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = self.range_of(observed)
        check_count(self.label, low.numel())
        started = self.has_statistics
        before = self.histogram if started else None
        self.histogram = add_values(before, observed, (low, high), self.group_dims(observed))
        self.min_vals = torch.minimum(self.min_vals, low) if started else low
        self.max_vals = torch.maximum(self.max_vals, high) if started else high

    def chosen_range(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = (v.reshape(-1).cpu() for v in (self.min_vals, self.max_vals))
        histogram = self.histogram.reshape(-1, 1 + BINS).cpu()
        parts = [
            self.choose(rows[:, 1:], rows[:, 0], a.clamp(max=0), b.clamp(min=0), global_scale)
            for rows, a, b in zip(
                *(torch.split(v, _AT_ONCE) for v in (histogram, low, high)), strict=True
            )
        ]
        like = self.min_vals
        return (
            torch.cat([part[0] for part in parts]).to(like).reshape(like.shape),
            torch.cat([part[1] for part in parts]).to(like).reshape(like.shape),
        )

    @abstractmethod
    def choose(
        self,
        counts: torch.Tensor,
        exponent: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range to store, (num_qparams,) each.

        counts:    (num_qparams, BINS) int64
        exponent:  (num_qparams,) int64; bins are 2^exponent wide
        low, high: (num_qparams,), the range of all values observed, and of zero
        """
        raise NotImplementedError

    def statistics_problem(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if not tensors:
            return None
        histogram, high = tensors.get("histogram"), tensors.get("max_vals")
        if histogram is None or high is None:
            return "it has no histogram of its range"
        if histogram.dtype != torch.int64 or histogram.shape != (*high.shape, 1 + BINS):
            kind = str(histogram.dtype).removeprefix("torch.")
            return f"histogram is of type {kind} and shape {tuple(histogram.shape)}"
        exponent, counts = histogram[..., 0], histogram[..., 1:]
        if bool(((exponent < SMALLEST_EXPONENT) | (exponent > _LARGEST_EXPONENT)).any()):
            return "histogram has bins of an impossible width"
        if bool((counts < 0).any()) or not bool((counts.sum(-1) > 0).all()):
            return "histogram has counts below zero, or none"
        return None
