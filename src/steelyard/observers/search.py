"""Searches whose result depends on a scale shared with fused partners.

NVFP4's local scales are stored relative to a global one, and fused layers share that. A weight is
searched with its own global scale when it is observed; if its partners need another, `get_qparams`
repeats the search. Until then the observer holds a reference to the weight.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch

from steelyard.errors import StatisticsError
from steelyard.kernels.qparams import global_scale_of
from steelyard.observers.base import Observer, reads_blocks

__all__ = ["KeepsWeight", "SearchObserver"]


class SearchObserver(Observer):
    """Base of observers that search; keeps the largest magnitude, which sets the global scale."""

    _statistics: ClassVar[tuple[str, ...]] = ("min_vals", "max_vals", "absmax")

    absmax: torch.Tensor
    """Largest magnitude observed: it sets the global scale, not the chosen range."""

    def own_absmax(self, observed: torch.Tensor) -> torch.Tensor:
        low, high = self.range_of(observed)
        return torch.maximum(-low.amin(), high.amax()).clamp(min=0)

    def own_global_scale(self, absmax: torch.Tensor) -> torch.Tensor | None:
        return self.global_scale_for(absmax) if self.args.strategy == "tensor_group" else None

    def global_absmax(self) -> torch.Tensor:
        return self.absmax

    @abstractmethod
    def search(
        self,
        observed: torch.Tensor,
        global_scale: torch.Tensor | None,
        importance: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the result of the search, two tensors (*qparam_shape)."""
        raise NotImplementedError


class KeepsWeight(SearchObserver):
    """A search of the last value observed, which can be repeated with another global scale."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        self._kept: _Kept | None = None

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        absmax = self.own_absmax(observed)
        importance = self.importance_for(observed)
        found = self.search(observed, self.own_global_scale(absmax), importance)
        self.remember(observed, *found)
        self.absmax = absmax
        # only a fused weight may need another global scale than its own
        fusible = self.args.strategy == "tensor_group" and self.base_name == "weight"
        self._kept = _Kept(observed, importance) if fusible else None

    def importance_for(self, observed: torch.Tensor) -> torch.Tensor | None:
        """Return weights that broadcast to `observed`, or None to weight all values equally."""
        return None

    @abstractmethod
    def remember(self, observed: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> None:
        """Set the statistics from the result of `search`."""
        raise NotImplementedError

    def searched_again(
        self, global_scale: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Search again with a shared global scale; None if it is this weight's own.

        Statistics from a file have no weight to search again.
        """
        if self._kept is None or global_scale is None:
            return None
        if torch.equal(global_scale, global_scale_of(self.absmax)):
            return None
        observed, importance = self._kept.read(self.label)
        return self.search(observed, global_scale, importance)

    def reset(self) -> None:
        super().reset()
        self._kept = None


class _Kept:
    """A weight (by reference, not copied) whose search may have to be repeated."""

    def __init__(self, observed: torch.Tensor, importance: torch.Tensor | None) -> None:
        self._observed = observed
        self._importance = importance
        self._version = self._now()

    def read(self, label: str) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._now() != self._version:
            raise StatisticsError(
                f"{label} was modified after it was observed, and its fused partners require "
                "another search: call get_qparams before modifying the weight"
            )
        return self._observed, self._importance

    def __getstate__(self) -> dict[str, object]:
        # the version counter of a copied tensor starts again at zero
        return {**self.__dict__, "_version": None if self._now() == self._version else -1}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        if self._version is None:
            self._version = self._now()

    def _now(self) -> int:
        return 0 if self._observed.is_inference() else self._observed._version
