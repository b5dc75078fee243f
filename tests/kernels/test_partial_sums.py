"""Sums of partial sums: any number of ranks, any gaps, one order, written out by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.distributed import batches_of, partial_sums_of
from steelyard.kernels.partial_sums import PARTIAL_SUMS, FixedOrderSum, begun, partial_sum_of


def zero() -> torch.Tensor:
    return torch.zeros(3)


def values(batches: int, seed: int) -> list[torch.Tensor]:
    """Numbers of such different sizes that every order of additions shows."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-12, 12, (batches, 3), generator=generator)
    return list(torch.randn(batches, 3, generator=generator) * 2.0**sizes)


def by_hand(terms: list[torch.Tensor]) -> torch.Tensor:
    """Add partial sums, then nodes of four of them, then those, each from left to right."""
    partials = [zero() for _ in range(PARTIAL_SUMS)]
    for batch, term in enumerate(terms):
        partials[partial_sum_of(batch, len(terms))] += term
    nodes = [((a + b) + c) + d for a, b, c, d in zip(*[iter(partials)] * 4, strict=True)]
    return ((nodes[0] + nodes[1]) + nodes[2]) + nodes[3]


def by_ranks(terms: list[torch.Tensor], ranks: int, seen: set[int] | None = None) -> torch.Tensor:
    whole = FixedOrderSum(zero)
    for rank in range(ranks):
        mine = FixedOrderSum(zero, partial_sums_of(rank, ranks).start)
        for batch in batches_of(len(terms), rank, ranks):
            if seen is None or batch in seen:
                mine.partial_sum(partial_sum_of(batch, len(terms))).add_(terms[batch])
        whole.extend(mine.partials())
    return whole.total()


@settings(deadline=None)
@given(st.integers(1, 70), st.integers(1, 20), st.integers(0, 99))
def test_any_number_of_ranks_adds_in_the_same_order(batches: int, ranks: int, seed: int) -> None:
    terms = values(batches, seed)
    assert torch.equal(by_ranks(terms, ranks), by_hand(terms))


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 20), st.sets(st.integers(0, 39)))
def test_batches_that_do_not_reach_a_module(batches: int, ranks: int, seen: set[int]) -> None:
    terms = values(batches, 1)
    told = [term if batch in seen else zero() for batch, term in enumerate(terms)]
    assert torch.equal(by_ranks(terms, ranks, seen), by_hand(told))


def test_another_order_would_show() -> None:
    terms = values(64, 0)
    assert not torch.equal(torch.stack(terms).sum(0), by_hand(terms))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8, 16, 20])
def test_shares_are_all_batches_in_order(ranks: int) -> None:
    for batches in (1, 2, 5, 16, 64, 100):
        taken = [batch for rank in range(ranks) for batch in batches_of(batches, rank, ranks)]
        assert taken == list(range(batches))
        assert len(batches_of(batches, 0, ranks)) > 0  # the first rank always has one


def test_one_process_holds_three_matrices() -> None:
    made: list[torch.Tensor] = []

    def counted() -> torch.Tensor:
        made.append(zero())
        return made[-1]

    total = FixedOrderSum(counted)
    held = []
    for partial_sum in range(PARTIAL_SUMS):
        total.partial_sum(partial_sum).add_(partial_sum)
        held.append(sum(p.value is not None for p in total._partials) + len(total._spare))
    assert max(held) == 3
    assert torch.equal(total.total(), zero() + sum(range(PARTIAL_SUMS)))
    assert len(made) <= 3 + PARTIAL_SUMS // 4  # what was added to another is used again


def test_partial_sums_come_in_order() -> None:
    total = FixedOrderSum(zero)
    total.partial_sum(3)
    with pytest.raises(ValueError, match="partial sum 1 comes after 3"):
        total.partial_sum(1)


def test_sums_that_did_not_fit_begin_with_zeros() -> None:
    first, second = FixedOrderSum(zero), FixedOrderSum(zero)
    for number in range(3):  # so that the first has a matrix to use again
        first.partial_sum(number).add_(1)
    with pytest.raises(torch.OutOfMemoryError), begun([first], 3) as (matrices, fresh):
        assert fresh
        matrices[0].fill_(7)
        raise torch.OutOfMemoryError
    with begun([first, second], 3) as (matrices, fresh):
        assert not fresh
        for matrix in matrices:
            matrix.add_(1)
    assert torch.equal(first.total(), zero() + 4)
    assert torch.equal(second.total(), zero() + 1)
