"""A moving average that can be cut anywhere and put together again.

With c the averaging constant, observation k moves the average m to (1 - c) * m + c * r_k, and the
first one sets it. A run of n observations is therefore an affine map of the average before it:
m -> (1 - c)^n * m + b. Knowing the run's own average m_n and its first observation r_0, b is
m_n - (1 - c)^n * r_0. So runs that were observed apart, by other ranks or on other days, join
into what one observer of all of them in that order would hold.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field
from torch import distributed as dist

from steelyard.observers.base import Observer
from steelyard.observers.options import ObserverOptions

__all__ = ["MovingAverageObserver", "MovingAverageOptions"]


class MovingAverageOptions(ObserverOptions):
    """Options of observers that average."""

    averaging_constant: float = Field(
        default=0.01, gt=0, le=1, description="weight of the newest observation"
    )


class MovingAverageObserver(Observer):
    """Base of observers whose range is a moving average; the first observation sets it."""

    Options = MovingAverageOptions

    _statistics: ClassVar[tuple[str, ...]] = (
        "min_vals",
        "max_vals",
        "first_min_vals",
        "first_max_vals",
    )
    _act_sync_dict: ClassVar = dict.fromkeys(_statistics, dist.ReduceOp.SUM)

    first_min_vals: torch.Tensor
    first_max_vals: torch.Tensor

    @property
    def avg_constant(self) -> float:
        return float(self.options.averaging_constant)

    def average(self, **latest: torch.Tensor) -> None:
        """Move each named statistic towards its latest value."""
        started = self.has_statistics
        for name, value in latest.items():
            if started:
                setattr(self, name, _lerp(getattr(self, name), value, self.avg_constant))
            else:
                setattr(self, name, value)
                setattr(self, f"first_{name}", value.clone())

    def contribution(self, counts: list[int], position: int) -> dict[str, torch.Tensor]:
        """Return terms whose sum over all parties is the average over all, in order."""
        statistics = self.get_statistics()
        keep = 1 - self.avg_constant
        later = keep ** sum(counts[position + 1 :])
        leads = sum(counts[:position]) == 0
        terms = {}
        for name, value in statistics.items():
            if name.startswith("first_"):
                terms[name] = value if leads else torch.zeros_like(value)
                continue
            start = 0 if leads else keep ** counts[position] * statistics[f"first_{name}"]
            terms[name] = later * (value - start)
        return terms


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    return start * (1 - weight) + end * weight
