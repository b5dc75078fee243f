"""A choice near the predicted best is kept only if it is measured to be better."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.algorithms.bit_budget import (
    SWAPS,
    by_kind,
    fewest_bits,
    least_loss,
    measured_best,
)
from steelyard.errors import RecipeError
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.recipes import load_recipe

COSTS = [[4, 8, 16], [8, 16, 32], [4, 8, 16]]
LOSSES = [[8.0, 0.5, 0.0], [6.0, 0.4, 0.0], [7.9, 0.45, 0.0]]


def loss_of(options: list[int]) -> float:
    return sum(each[k] for each, k in zip(LOSSES, options, strict=True))


def test_the_best_prediction_is_kept_if_measurements_agree() -> None:
    tried = []

    def measure(options: list[int]) -> list[float]:
        tried.append(list(options))
        return [loss_of(options), loss_of(options) + 0.1]

    best, uniform = measured_best(COSTS, LOSSES, 20, measure)
    assert best.options == least_loss(COSTS, LOSSES, 20) == [1, 0, 0]
    assert uniform is not None and uniform.options == [0, 0, 0]
    assert uniform.kl == pytest.approx(loss_of([0, 0, 0]) + 0.05)
    assert len(tried) <= 2 + SWAPS
    for options in tried:
        assert sum(each[k] for each, k in zip(COSTS, options, strict=True)) <= 20


@pytest.mark.parametrize(("noise", "expected"), [(0.0, [0, 0, 1]), (50.0, [1, 0, 0])])
def test_a_swap_wins_only_beyond_noise(noise: float, expected: list[int]) -> None:
    """The third unit is worth more than predicted: by measurement, if that is sure."""

    def measure(options: list[int]) -> list[float]:
        found = loss_of(options) - (2.0 if options == [0, 0, 1] else 0.0)
        return [found, found + (noise if options == [0, 0, 1] else 0.0)]

    assert measured_best(COSTS, LOSSES, 20, measure)[0].options == expected


def test_swaps_go_on_from_one_that_won() -> None:
    """Two swaps away from the prediction; each of them alone is a gain."""
    wanted = [0, 0, 2, 2]
    costs = [[4, 8, 12]] * 4
    losses = [[3.0, 2.0, 1.0 + 1e-6] for _ in wanted]

    def measure(options: list[int]) -> list[float]:
        found = float(sum(abs(a - b) for a, b in zip(options, wanted, strict=True)))
        return [found, found + 0.1]

    assert least_loss(costs, losses, 32) == [1, 1, 1, 1]
    assert measured_best(costs, losses, 32, measure)[0].options == wanted


def test_bits_that_a_swap_leaves_over_are_spent() -> None:
    """The wide unit gives its bits to one that needs half of them, then to another."""
    costs = [[4, 8], [4, 8], [8, 16]]
    losses = [[2.0, 1.5], [2.0, 1.5], [4.0, 2.9]]

    def measure(options: list[int]) -> list[float]:
        found = 9.0 - 3 * options[0] - 2 * options[1] - options[2]
        return [found, found + 0.1]

    assert least_loss(costs, losses, 24) == [0, 0, 1]
    assert measured_best(costs, losses, 24, measure)[0].options == [1, 1, 0]


def test_losses_of_a_kind_follow_its_measurement() -> None:
    kinds = ["qkv", "mlp", "qkv"]

    def measure(options: list[int]) -> list[float]:
        own = [each[k] for each, k in zip(LOSSES, options, strict=True)]
        return [2.0 * own[0] + own[1] + 2.0 * own[2]]

    found = by_kind(LOSSES, kinds, measure)
    assert found[0] == pytest.approx([16.0, 1.0, 0.0])
    assert found[1] == pytest.approx(LOSSES[1])
    assert found[2] == pytest.approx([15.8, 0.9, 0.0])


def test_a_measurement_far_off_is_noise() -> None:
    found = by_kind(LOSSES, ["a", "a", "a"], lambda options: [1e9])
    assert found[0] == pytest.approx([32.0, 2.0, 0.0])


@settings(deadline=None, max_examples=40)
@given(st.floats(0.0, 22.0))
def test_fewest_bits_are_the_cheapest_of_the_frontier_within_the_limit(limit: float) -> None:
    """Measurements equal to the predictions make the answer that of all choices."""
    found = fewest_bits(COSTS, LOSSES, 4, limit, lambda options: [loss_of(options)])
    every = [list(each) for each in itertools.product(range(3), repeat=3)]
    cost = {tuple(o): sum(c[k] for c, k in zip(COSTS, o, strict=True)) for o in every}
    least = min(cost[tuple(o)] for o in every if loss_of(o) <= limit)
    assert found is not None and loss_of(found.options) <= limit
    assert cost[tuple(found.options)] == least


def test_a_limit_that_nothing_reaches() -> None:
    assert fewest_bits(COSTS, LOSSES, 4, 0.01, lambda options: [1.0]) is None


def test_auto_rounds_name_of_the_average() -> None:
    (modifier,) = load_recipe("BitBudgetModifier: {avg_bits: 4.5}").modifiers
    assert modifier == BitBudgetModifier(bits=4.5)
    assert BitBudgetModifier(bits=4.5, bit_widths=[8, 4, 4]).bit_widths == [4, 8]


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "give one of bits and max_kl"),
        ({"bits": 4.5, "max_kl": 0.1}, "give one of bits and max_kl"),
        ({"bits": 0}, "must be more than 0"),
        ({"bits": 4.5, "bit_widths": [4, 9]}, "9 is not 2 to 8, or 16 for unquantized"),
        ({"bits": 4.5, "bit_widths": [4]}, "nothing to choose"),
    ],
)
def test_options_that_say_nothing(options: dict[str, object], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem):
        BitBudgetModifier(**options)
