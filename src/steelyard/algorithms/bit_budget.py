"""Chooses one scheme for each unit: by predicted losses first, then by measured KL divergence.

The predicted losses add up, so the best choice within a budget is exact (`kernels.knapsack`). The
divergence of the whole model is not quite their sum. So the losses of each kind of unit are first
brought to what is measured for that kind, and then a few choices near the best are measured, and
kept only if the divergence on held-out samples falls by more than noise.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass

from steelyard.algorithms.guard import is_gain
from steelyard.kernels.knapsack import pareto_frontier

__all__ = ["Measured", "by_kind", "fewest_bits", "least_loss", "measured_best"]

KINDS = 8  # of units to measure, those with the largest losses
FACTOR = 4.0  # by which a measured kind may differ from its prediction; more is noise
SWAPS = 8  # choices near the best to measure
MEASUREMENTS = 8  # of a search for the fewest bits
NEAR = 0.02  # bits: close enough to end that search

Options = list[int]
"""The option of each unit."""
Measure = Callable[[Options], list[float]]
"""Returns the divergence of each held-out sample under a choice."""
Table = Sequence[Sequence[float]]
"""A value for each option of each unit; options by rising cost."""


@dataclass(frozen=True)
class Measured:
    """A choice, and the divergence of each held-out sample under it."""

    options: Options
    divergences: list[float]

    @property
    def kl(self) -> float:
        return sum(self.divergences) / len(self.divergences)


def least_loss(costs: Sequence[Sequence[int]], losses: Table, budget: int) -> Options:
    """Return the choice of least predicted loss within a budget that the cheapest one keeps."""
    frontier = pareto_frontier(costs, losses)
    return frontier.options(max(frontier.within(budget), 0))


def by_kind(losses: Table, kinds: Sequence[Hashable], measure: Measure) -> list[list[float]]:
    """Return losses times a factor for each kind of unit, so that they agree with measurements.

    A kind, such as q/k/v of all layers, is measured with its units at their cheapest options and
    all others at their most expensive. The prediction treats tokens as independent, which misses
    more for some kinds than for others.
    """
    total = dict.fromkeys(kinds, 0.0)
    for kind, each in zip(kinds, losses, strict=True):
        total[kind] += each[0]
    factors: dict[Hashable, float] = {}
    for kind in heapq.nlargest(KINDS, total, key=lambda kind: total[kind]):
        options = [
            0 if own == kind else len(each) - 1 for own, each in zip(kinds, losses, strict=True)
        ]
        predicted = sum(each[k] for each, k in zip(losses, options, strict=True))
        if predicted > 0 and total[kind] > 0:
            measured = Measured(options, measure(options)).kl
            factors[kind] = min(max(measured / predicted, 1 / FACTOR), FACTOR)
    return [
        [value * factors.get(kind, 1.0) for value in each]
        for kind, each in zip(kinds, losses, strict=True)
    ]


def measured_best(
    costs: Sequence[Sequence[int]], losses: Table, budget: int, measure: Measure
) -> tuple[Measured, Measured | None]:
    """Return the choice of least loss, or one near it with a lower divergence by measurement.

    Also returns the choice that gives all units the same option, for comparison, if one fits.
    """
    start = least_loss(costs, losses, budget)
    best = Measured(start, measure(start))
    alike = _uniform(costs, budget)
    uniform = None
    if alike is not None:
        uniform = best if alike == start else Measured(alike, measure(alike))
    if uniform is not None and uniform.kl <= best.kl:  # then a mixture is not worth it
        best = uniform
    if len(best.divergences) < 2:  # nothing is known of the noise
        return best, uniform
    tried = [start, alike]
    for _ in range(SWAPS):
        swaps = _swaps(costs, losses, budget, best.options)
        found = min((each for each in swaps if each[1] not in tried), default=None)
        if found is None:
            break
        tried.append(found[1])
        swapped = Measured(found[1], measure(found[1]))
        if is_gain(best.divergences, swapped.divergences):
            best = swapped
    return best, uniform


def fewest_bits(
    costs: Sequence[Sequence[int]], losses: Table, weights: int, limit: float, measure: Measure
) -> Measured | None:
    """Return the cheapest choice of the frontier whose measured divergence is within a limit.

    weights: by which costs are divided for bits per weight
    returns: None if even the most expensive choice exceeds the limit
    """
    frontier = pareto_frontier(costs, losses)
    last = len(frontier) - 1
    low, high, found = -1, last + 1, None  # too few bits, enough bits, what was measured there
    state = min(int((frontier.losses > limit).sum()), last)  # where the prediction is the limit
    for number in range(MEASUREMENTS):
        options = frontier.options(state)
        tried = Measured(options, measure(options))
        if tried.kl <= limit:
            high, found = state, tried
        else:
            low = state
        bits = [int(frontier.costs[min(max(each, 0), last)]) / weights for each in (low, high)]
        if high - low <= 1 or (found is not None and bits[1] - bits[0] < NEAR):
            break
        if found is None and number == MEASUREMENTS - 2:
            state = last
        else:  # halve the distance in bits: states are dense where many choices cost much the same
            middle = int((bits[0] + bits[1]) / 2 * weights)
            state = min(max(frontier.within(middle), low + 1), high - 1)
    return found


def _uniform(costs: Sequence[Sequence[int]], budget: int) -> Options | None:
    """Return the most expensive choice within the budget of the same option for all units."""
    for k in reversed(range(min(map(len, costs)))):
        if sum(each[k] for each in costs) <= budget:
            return [k] * len(costs)
    return None


def _swaps(
    costs: Sequence[Sequence[int]], losses: Table, budget: int, start: Options
) -> Iterator[tuple[float, Options]]:
    """Yield choices in which one unit has more and another fewer bits, with the loss they add.

    Where bits are left over, one unit has more and none has fewer.
    """
    left = budget - sum(each[k] for each, k in zip(costs, start, strict=True))
    moves = [
        (u, k, costs[u][k] - costs[u][old], losses[u][k] - losses[u][old])
        for u, old in enumerate(start)
        for k in range(len(costs[u]))
        if k != old
    ]
    fewer = [move for move in moves if move[2] < 0]
    for u, k, more, gain in moves:
        if more <= 0:
            continue
        for v, m, less, loss in [*fewer, (u, k, 0, 0.0)]:
            if (u != v or m == k) and more + less <= left:
                changed = list(start)
                changed[v], changed[u] = m, k
                yield gain + loss, changed
