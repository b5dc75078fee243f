"""The knapsack is exact: no other choice within a cost has a smaller loss."""

from __future__ import annotations

import itertools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.knapsack import pareto_frontier

ITEMS = st.lists(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 40)), min_size=1, max_size=3),
    min_size=1,
    max_size=4,
)


def split(
    items: list[list[tuple[int, int]]],
) -> tuple[list[list[int]], list[list[float]]]:
    """Losses are multiples of 1/8, so that sums are exact in any order."""
    costs = [[cost for cost, _ in options] for options in items]
    return costs, [[loss / 8 for _, loss in options] for options in items]


def total(table: list[list[float]] | list[list[int]], chosen: tuple[int, ...] | list[int]) -> float:
    return sum(options[k] for options, k in zip(table, chosen, strict=True))


@settings(deadline=None, max_examples=60)
@given(ITEMS)
def test_the_frontier_is_that_of_all_choices(items: list[list[tuple[int, int]]]) -> None:
    costs, losses = split(items)
    every = list(itertools.product(*(range(len(options)) for options in items)))
    known = [(total(costs, each), total(losses, each)) for each in every]
    frontier = pareto_frontier(costs, losses)
    for budget in range(int(max(cost for cost, _ in known)) + 1):
        within = [loss for cost, loss in known if cost <= budget]
        state = frontier.within(budget)
        if not within:
            assert state == -1
            continue
        assert float(frontier.losses[state]) == min(within)
        chosen = frontier.options(state)
        assert total(costs, chosen) == int(frontier.costs[state]) <= budget
        assert total(losses, chosen) == min(within)


@settings(deadline=None, max_examples=60)
@given(ITEMS)
def test_no_state_of_the_frontier_beats_another(items: list[list[tuple[int, int]]]) -> None:
    frontier = pareto_frontier(*split(items))
    costs, losses = frontier.costs.tolist(), frontier.losses.tolist()
    assert costs == sorted(set(costs))
    assert losses == sorted(set(losses), reverse=True)


def test_many_units_of_few_sizes_have_a_small_frontier() -> None:
    sizes = [3, 1, 8, 4] * 80
    costs = [[size * bits for bits in (4, 8, 16)] for size in sizes]
    losses = [[size / (i + 1), size / (16 * i + 16), 0.0] for i, size in enumerate(sizes)]
    frontier = pareto_frontier(costs, losses)
    assert len(frontier) <= 3 * sum(sizes) + 1
    chosen = frontier.options(frontier.within(6 * sum(sizes)))
    assert math.isclose(
        total(losses, chosen), float(frontier.losses[frontier.within(6 * sum(sizes))])
    )
