"""Ranges from the smallest to the largest value observed."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import distributed as dist

from steelyard.observers.base import Observer, reads_blocks
from steelyard.observers.moving_average import MovingAverageObserver
from steelyard.observers.observer_options import ActivationOptions, ObserverOptions

__all__ = ["MemorylessMinMaxObserver", "MinMaxObserver", "StaticMinMaxObserver"]


@Observer.register("memoryless_minmax")
class MemorylessMinMaxObserver(Observer):
    """The range of the last value observed."""

    suits = "weights"

    Options = ObserverOptions

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        self.min_vals, self.max_vals = self.range_of(observed)


@Observer.register("static_minmax")
class StaticMinMaxObserver(MemorylessMinMaxObserver):
    """The range of all values observed."""

    suits = "activations"

    Options = ActivationOptions

    _act_sync_dict: ClassVar = {"min_vals": dist.ReduceOp.MIN, "max_vals": dist.ReduceOp.MAX}

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = self.range_of(observed)
        started = self.has_statistics
        self.min_vals = torch.minimum(self.min_vals, low) if started else low
        self.max_vals = torch.maximum(self.max_vals, high) if started else high


@Observer.register("minmax")
class MinMaxObserver(MovingAverageObserver):
    """A moving average of the ranges observed."""

    suits = "activations"

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = self.range_of(observed)
        self.average(min_vals=low, max_vals=high)
