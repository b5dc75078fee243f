"""Chooses one option for each item, so that the total loss is least within a total cost.

A dynamic programme over the total cost. After each item it holds the Pareto frontier: the states
that no other state beats in both cost and loss. The items may be added in any order, and a state
that is beaten stays beaten whatever follows, so the result is exact. Costs are integers; if they
have a large common divisor, as the sizes of weights have, few totals exist and the frontier is
small.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass

import torch

__all__ = ["Frontier", "pareto_frontier"]


@dataclass(frozen=True)
class Frontier:
    """The best choices for every total cost.

    costs:  (states,), int64, rising
    losses: (states,), float64, falling
    steps:  for each item, the state before it and the option chosen, of each state after it
    """

    costs: torch.Tensor
    losses: torch.Tensor
    steps: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    def __len__(self) -> int:
        return len(self.costs)

    def within(self, cost: int) -> int:
        """Return the index of the state of least loss within a cost; -1 if all cost more."""
        return bisect.bisect_right(self.costs.tolist(), cost) - 1

    def options(self, state: int) -> list[int]:
        """Return the option of each item in a state."""
        found = []
        for before, chosen in reversed(self.steps):
            found.append(int(chosen[state]))
            state = int(before[state])
        return found[::-1]


def pareto_frontier(costs: Sequence[Sequence[int]], losses: Sequence[Sequence[float]]) -> Frontier:
    """Return the frontier of all ways to choose one option for each item.

    costs, losses: of each option of each item

    >>> frontier = pareto_frontier([[4, 8], [4, 8]], [[2.0, 0.1], [1.0, 0.1]])
    >>> frontier.costs.tolist(), frontier.options(frontier.within(13))
    ([8, 12, 16], [1, 0])
    """
    cost, loss = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)
    steps = []
    for item_costs, item_losses in zip(costs, losses, strict=True):
        more = torch.tensor(item_costs, dtype=torch.int64)
        added = torch.tensor(item_losses, dtype=torch.float64)
        wide = (cost[:, None] + more).flatten()  # (states x options)
        harm = (loss[:, None] + added).flatten()
        order = harm.argsort(stable=True)
        order = order[wide[order].argsort(stable=True)]  # by cost, then by loss
        least = harm[order].cummin(0).values
        better = torch.ones(len(order), dtype=torch.bool)
        better[1:] = harm[order][1:] < least[:-1]
        kept = order[better]
        cost, loss = wide[kept], harm[kept]
        steps.append((kept // len(more), kept % len(more)))
    return Frontier(cost, loss, tuple(steps))
