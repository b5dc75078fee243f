"""Statistics for algorithms, each declaring how the values of several ranks join.

    state = {"largest": Largest()}
    state["largest"].add(x.abs().amax(0))
    state["largest"].value

The joined value equals, bit for bit, that of one process over all batches in order.
"""

from __future__ import annotations

import torch

from steelyard.distributed import Ranks
from steelyard.errors import CalibrationError
from steelyard.kernels.exact_sum import add_exactly, carried, empty_bins, total

__all__ = ["ExactSum", "Largest", "Smallest", "Statistic"]

_CARRY_AFTER = 1024  # additions


class Statistic:
    """A running value over batches; None before the first."""

    def __init__(self) -> None:
        self._value: torch.Tensor | None = None

    @property
    def value(self) -> torch.Tensor | None:
        return self._value

    def add(self, x: torch.Tensor) -> None:
        x = x.detach()
        if self._value is not None and self._value.shape != x.shape:
            raise CalibrationError(
                f"{type(self).__name__} has shape {tuple(self._value.shape)} and cannot add "
                f"{tuple(x.shape)}: reduce batches to one shape first"
            )
        self._value = x.clone() if self._value is None else self._added(self._value, x)

    def _added(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def join(self, ranks: Ranks) -> None:
        """Join the values of all ranks, in rank order."""
        if ranks.count == 1:
            return
        device = None if self._value is None else self._value.device
        parts = ranks.gather(self._value)
        self._value = None
        for part in parts:
            if part is not None:
                self.add(part if device is None else part.to(device))


class Largest(Statistic):
    """The elementwise maximum."""

    def _added(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(one, other)


class Smallest(Statistic):
    """The elementwise minimum."""

    def _added(self, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.minimum(one, other)


class ExactSum(Statistic):
    """The exact sum, as float64: any order of batches gives the same bits."""

    def __init__(self) -> None:
        super().__init__()
        self._bins: torch.Tensor | None = None
        self._added_up = 0

    def add(self, x: torch.Tensor) -> None:
        x = x.detach()
        if self._bins is None:
            self.shape = x.shape
            self._bins = empty_bins(x.numel(), x.device)
        elif x.shape != self.shape:
            raise CalibrationError(
                f"ExactSum has shape {tuple(self.shape)} and cannot add {tuple(x.shape)}: reduce "
                "batches to one shape first"
            )
        add_exactly(self._bins, x.reshape(-1))
        self._added_up += 1
        if self._added_up % _CARRY_AFTER == 0:
            self._bins = carried(self._bins)

    @property
    def value(self) -> torch.Tensor | None:
        return None if self._bins is None else total(self._bins).reshape(self.shape)

    def join(self, ranks: Ranks) -> None:
        if ranks.count == 1:
            return
        device = None if self._bins is None else self._bins.device
        mine = None if self._bins is None else (list(self.shape), carried(self._bins))
        parts = [part for part in ranks.gather(mine) if part is not None]
        if not parts:
            return
        self.shape = torch.Size(parts[0][0])
        summed = torch.stack([bins for _, bins in parts]).sum(0)  # below 2^40 units each: exact
        self._bins = carried(summed if device is None else summed.to(device))
