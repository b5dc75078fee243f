"""Sums in bins: exact, against fractions, in any order and any grouping."""

from __future__ import annotations

from fractions import Fraction

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.kernels.exact_sum import UNITS, add_exactly, carried, empty_bins, total

# multiples of the smallest unit that a float32 can be, up to what the first bin takes
numbers = st.floats(2.0**-70, 2.0**60, width=32, allow_subnormal=False) | st.just(0.0)


def exact(bins: torch.Tensor) -> Fraction:
    return sum((Fraction(float(value)) for value in bins[:, 0]), Fraction(0))


def summed(values: list[float]) -> torch.Tensor:
    bins = empty_bins(1)
    for value in values:
        add_exactly(bins, torch.tensor([value]))
    return bins


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40))
def test_bins_hold_the_exact_sum(values: list[float]) -> None:
    assert exact(summed(values)) == sum(map(Fraction, values))
    assert exact(carried(summed(values))) == sum(map(Fraction, values))


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40), st.randoms(), st.integers(0, 40))
def test_neither_order_nor_grouping_changes_a_bit(values, random, cut: int) -> None:
    mixed = random.sample(values, len(values))
    apart = carried(summed(mixed[:cut])) + carried(summed(mixed[cut:]))
    assert torch.equal(carried(summed(values)), carried(apart))
    assert torch.equal(total(summed(values)), total(apart))


@settings(deadline=None)
@given(st.lists(numbers, min_size=1, max_size=40))
def test_total_is_the_sum(values: list[float]) -> None:
    expected = torch.tensor([float(sum(map(Fraction, values)))], dtype=torch.float64)
    assert_close(total(summed(values)), expected, rtol=1e-15, atol=0)


def test_plain_float32_sums_do_depend_on_the_order() -> None:
    """Else the properties above would prove nothing."""
    values = torch.tensor([1.0, 2.0**-24, 2.0**-24])
    assert (values[0] + values[1]) + values[2] != values[0] + (values[1] + values[2])


def test_thousands_of_terms_stay_exact() -> None:
    bins = empty_bins(2)
    term = torch.tensor([3.0, 1.0 + 2.0**-20])
    for _ in range(4000):
        add_exactly(bins, term)
    assert exact(bins[:, 1:]) == 4000 * (1 + Fraction(1, 2**20))
    assert_close(total(bins), 4000.0 * term.double(), rtol=0, atol=0)


def test_dust_below_the_last_unit_does_not_count() -> None:
    assert exact(summed([UNITS[-1] / 4])) == 0
