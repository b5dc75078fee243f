"""Keeps what held-out samples confirm."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from steelyard.algorithms.tunables import Tunable
from steelyard.words import count

__all__ = ["Guard", "is_gain", "paired_gain"]

NOISE = 2.0  # standard errors


def paired_gain(start: Sequence[float], after: Sequence[float]) -> tuple[float, float]:
    """Return by how much each sample fell, on average, and the standard error of that."""
    won = [a - b for a, b in zip(start, after, strict=True)]
    mean = sum(won) / len(won)
    variance = sum((each - mean) ** 2 for each in won) / max(len(won) - 1, 1)
    return mean, math.sqrt(variance / len(won))


def is_gain(start: Sequence[float], after: Sequence[float]) -> bool:
    """Whether samples fell by more than noise explains; a single one need only fall."""
    mean, error = paired_gain(start, after)
    return mean > NOISE * error


class Guard:
    """Keeps the best epoch on held-out samples, and the start if that won no more than noise."""

    def __init__(self, tunables: Sequence[Tunable], start: Sequence[float]) -> None:
        self.tunables = tunables
        self.start = start
        self.least = start
        self.epochs = 0
        self.best_epoch = 0
        self._kept: list[torch.Tensor] = []

    def better(self, divergences: Sequence[float]) -> bool:
        """Keep the changes of an epoch if its divergence is the least so far."""
        self.epochs += 1
        is_better = sum(divergences) < sum(self.least)
        if is_better:
            self.least, self.best_epoch = divergences, self.epochs
            self._kept = [each.change.clone() for each in self.tunables]
        return is_better

    @property
    def gain(self) -> tuple[float, float]:
        return paired_gain(self.start, self.least)

    @property
    def won(self) -> bool:
        return is_gain(self.start, self.least)

    def best(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the best epoch that differ from the start; none without a gain."""
        if not self.won:
            return {}
        found = {}
        for tunable, change in zip(self.tunables, self._kept, strict=True):
            tunable.change.copy_(change)
            stored = tunable.stored()
            if not torch.equal(stored.float(), tunable.start):
                found[tunable.key] = stored
        return found

    def summary(self) -> str:
        mean, error = self.gain
        before, after = (sum(each) / len(each) for each in (self.start, self.least))
        measured = (
            f"KL divergence to the original on {count(len(self.start), 'held-out sample')} "
            f"{before:.4g} -> {after:.4g}, won {mean:.2g} ± {error:.1g}, "
            f"epoch {self.best_epoch} of {self.epochs}"
        )
        if self.won:
            return f"TuningModifier: {measured}"
        return f"TuningModifier changed nothing, since it won no more than noise: {measured}"
