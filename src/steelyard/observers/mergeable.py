"""The statistics of an observer: declared, merged, saved and reset."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar, cast

import torch
from torch import distributed as dist

from steelyard.distributed.packing import gather_unwatched
from steelyard.errors import StatisticsError
from steelyard.observers import observer_state
from steelyard.observers.combine import combine, not_mergeable
from steelyard.observers.linked import disagreement

if TYPE_CHECKING:
    from steelyard.observers.base import Observer

__all__ = ["MergeableStatistics"]

Self = TypeVar("Self", bound="MergeableStatistics")


class MergeableStatistics:
    """Base of observers; a subclass declares its statistics and how to combine each."""

    _act_sync_dict: ClassVar[dict[str, Any]] = {}
    """Statistic -> the operation that combines it (`observers.combine`); empty for an observer that
    keeps only its last observation."""

    _statistics: ClassVar[tuple[str, ...]] = ("min_vals", "max_vals")
    """Statistics that exist after the first observation."""

    num_observed_tokens: int
    num_updates: int
    observed_dtype: torch.dtype | None
    observed_shape: torch.Size | None

    @property
    def has_statistics(self) -> bool:
        return all(getattr(self, name, None) is not None for name in self._statistics)

    def statistic_names(self) -> list[str]:
        return list(dict.fromkeys((*self._statistics, *self._act_sync_dict)))

    def get_statistics(self) -> dict[str, torch.Tensor]:
        """Return the statistics that exist so far."""
        values = {name: getattr(self, name, None) for name in self.statistic_names()}
        return {name: value for name, value in values.items() if value is not None}

    def reset(self) -> None:
        """Forget everything observed; options and fusion stay."""
        for name in self.statistic_names():
            if name in self.__dict__:
                delattr(self, name)
        self.observed_dtype, self.observed_shape = None, None
        self.num_observed_tokens = 0
        self.num_updates = 0

    def recomputed_statistics(self) -> tuple[str, ...]:
        """Return the statistics that are recomputed from others instead of combined."""
        return ()

    def statistics_problem(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        """Return what is wrong with statistics of a file, beyond what holds for all observers."""
        return None

    def combined(self, values: dict[str, torch.Tensor], states: int) -> None:
        """Replace the statistics; a subclass recomputes those that depend on others.

        states: number of states that they were combined from
        """
        for name in self._statistics:
            if name not in values:
                self.__dict__.pop(name, None)
        for name, value in values.items():
            self._replace(name, value)

    def _replace(self, name: str, value: torch.Tensor) -> None:
        """Set a statistic, in place if possible, since a module may share the tensor."""
        current = getattr(self, name, None)
        if current is None:
            setattr(self, name, value.clone())
        elif (
            current.dtype == value.dtype
            and current.shape == value.shape
            and current.is_contiguous()
            and not current.is_inference()
        ):
            current.copy_(value)
        else:
            setattr(self, name, value.to(current.device, copy=True).contiguous())

    # -- combining --------------------------------------------------------------------------

    def merge(self: Self, other: Observer) -> Self:
        """Update as if this observer had also observed, after its own, the values of `other`."""
        this = cast("Observer", self)
        if this.calculates:
            raise not_mergeable(this)
        if not self._act_sync_dict:
            raise StatisticsError(
                f"{this.label} keeps only its last observation, so there is nothing to merge: "
                "use an observer that accumulates, such as static_minmax"
            )
        _check_alike(this, other)
        combine(this, [observer_state.state_of(each, copy=False) for each in (this, other)])
        return self

    def sync_activation_stats(self) -> list[dist.Work]:
        """Combine the statistics of all ranks, in rank order; complete when it returns.

        Every rank calls it for the same observers in the same order, even if it has observed
        nothing.

        The returned list of handles to wait for is empty.
        """
        if not (self._act_sync_dict and dist.is_available() and dist.is_initialized()):
            return []
        this = cast("Observer", self)
        states = gather_unwatched(observer_state.state_of(this))
        for rank, (identity, _) in enumerate(states):
            differing = observer_state.differing(
                states[0][0], identity, "on rank 0", f"on rank {rank}"
            )
            if differing:
                raise StatisticsError(
                    f"{this.label}: all ranks must hold the same observer, but {differing}"
                )
        if any(self._act_sync_dict.keys() & tensors.keys() for _, tensors in states):
            combine(this, states)
        return []

    # -- files ------------------------------------------------------------------------------

    def save_statistics(self, path: str | Path) -> None:
        observer_state.save(cast("Observer", self), path)

    def load_statistics(self: Self, path: str | Path) -> Self:
        observer_state.load(cast("Observer", self), path)
        return self


def _check_alike(first: Observer, second: Observer) -> None:
    differing = disagreement(first.args, second.args)
    options = [observer_state.options_of(each) for each in (first, second)]
    if type(first) is not type(second) or first.base_name != second.base_name:
        differing = f"{first.label} and {second.label}"
    elif options[0] != options[1]:
        differing = f"options {options[0]} and {options[1]}"
    if differing:
        raise StatisticsError(
            f"only observers of one class and options can be merged, not {differing}"
        )
