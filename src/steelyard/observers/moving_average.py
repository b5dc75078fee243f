"""A moving average that can be combined over ranks and files.

With c the averaging constant, observation k moves the average m to (1 - c) * m + c * r_k, and the
first one sets it. The observer keeps every r_k, a few numbers per observation. Combining averages
the r_k of all ranks or files again, from the first, and gives the bits of one observer that
observed everything.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from pydantic import Field

from steelyard.observers.base import Observer
from steelyard.observers.combine import IN_ORDER
from steelyard.observers.observer_options import ActivationOptions

__all__ = ["MovingAverageObserver", "MovingAverageOptions"]


class MovingAverageOptions(ActivationOptions):
    """Options of observers that average."""

    averaging_constant: float = Field(
        default=0.01, gt=0, le=1, description="weight of the newest observation"
    )


class MovingAverageObserver(Observer):
    """Base of observers whose range is a moving average; the first observation sets it.

    min_vals_history and so on: (num_observations, *qparam_shape), the values averaged
    """

    Options = MovingAverageOptions

    _averaged: ClassVar[tuple[str, ...]] = ("min_vals", "max_vals")
    _act_sync_dict: ClassVar = {f"{name}_history": IN_ORDER for name in _averaged}

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._seen: dict[str, list[torch.Tensor]] = {name: [] for name in self._averaged}

    @property
    def avg_constant(self) -> float:
        return float(self.options.averaging_constant)

    def average(self, **latest: torch.Tensor) -> None:
        """Move each named statistic towards its latest value."""
        for name, value in latest.items():
            before = self._seen[name]
            moved = _lerp(getattr(self, name), value, self.avg_constant) if before else value
            setattr(self, name, moved)
            before.append(value.clone())

    # -- statistics -------------------------------------------------------------------------

    def get_statistics(self) -> dict[str, torch.Tensor]:
        kept = {f"{name}_history": torch.stack(v) for name, v in self._seen.items() if v}
        return {**super().get_statistics(), **kept}

    def recomputed_statistics(self) -> tuple[str, ...]:
        return self._averaged

    def combined(self, values: dict[str, torch.Tensor], states: int) -> None:
        """Average all observations again, from the first."""
        devices = {name: getattr(self, name).device for name in self._averaged if self._seen[name]}
        super().combined({k: v for k, v in values.items() if not k.endswith("_history")}, states)
        for name in self._averaged:
            self._seen[name] = []
            for value in values.get(f"{name}_history", ()):
                self.average(**{name: value.to(devices.get(name, value.device))})

    def reset(self) -> None:
        super().reset()
        self._seen = {name: [] for name in self._averaged}


def _lerp(start: torch.Tensor, end: torch.Tensor, weight: float) -> torch.Tensor:
    return start * (1 - weight) + end * weight
