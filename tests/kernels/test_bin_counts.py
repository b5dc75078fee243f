"""Counts are NumPy's on all values together, however they arrive."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from steelyard.kernels.bin_counts import BINS, SMALLEST_EXPONENT, add_values, joined
from steelyard.kernels.range import range_of

HALF = BINS // 2
BACKENDS = ["reference", "compiled"]


def histogram_of(x: torch.Tensor, before: torch.Tensor | None, backend: str) -> torch.Tensor:
    return add_values(before, x, range_of(x), backend=backend)


def numpy_counts(values: np.ndarray, exponent: int) -> np.ndarray:
    """Both sides of zero, each by np.histogram over the same edges."""
    values = values.astype(np.float64)
    edges = np.ldexp(np.arange(HALF + 1, dtype=np.float64), exponent)
    below, _ = np.histogram(-values[values < 0], edges)
    above, _ = np.histogram(values[values >= 0], edges)
    return np.concatenate([below[::-1], above])


def expected_exponent(values: np.ndarray) -> int:
    """The least width at which the largest magnitude fits; found by trying."""
    largest = float(np.abs(values.astype(np.float64)).max())
    exponent = SMALLEST_EXPONENT
    while largest >= np.ldexp(HALF, exponent):
        exponent += 1
    return exponent


def check(histogram: torch.Tensor, values: np.ndarray) -> None:
    exponent = int(histogram[0])
    assert exponent == expected_exponent(values)
    np.testing.assert_array_equal(histogram[1:].numpy(), numpy_counts(values, exponent))
    assert int(histogram[1:].sum()) == values.size


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
PARTS = st.lists(arrays(np.float32, st.integers(1, 30), elements=FINITE), min_size=1, max_size=5)


@pytest.mark.parametrize("backend", BACKENDS)
@settings(max_examples=40)
@given(parts=PARTS, order=st.randoms(use_true_random=False))
def test_counts_and_joins_are_those_of_all_values(backend: str, parts, order) -> None:
    """Any order, one by one and joined, over all of fp32, subnormal numbers among it."""
    in_turn = None
    for part in parts:
        in_turn = histogram_of(torch.from_numpy(part).reshape(1, 1, -1), in_turn, backend)
    check(in_turn[0], np.concatenate(parts))
    alone = [histogram_of(torch.from_numpy(p).reshape(1, 1, -1), None, backend) for p in parts]
    order.shuffle(alone)
    together = alone[0]
    for other in alone[1:]:
        together = joined(together, other)
    assert torch.equal(together, in_turn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_many_values_of_each_type(dtype: torch.dtype) -> None:
    """More than a 16-bit count holds, in one bin and spread; fp64 runs on the reference."""
    x = torch.randn(70_000, generator=torch.Generator().manual_seed(0)) * 3
    x = torch.cat([x, torch.full((300_000,), 0.001), torch.tensor([-0.0, 0.0, 12.5])]).to(dtype)
    for backend in ["reference"] if dtype == torch.float64 else BACKENDS:
        found = histogram_of(x.reshape(1, 1, -1), None, backend)
        check(found[0], x.double().numpy())


def test_zero_alone_and_the_smallest_numbers() -> None:
    smallest = 2.0**-149
    for values in ([0.0], [-0.0], [smallest, -smallest], [smallest, 1.0], [-smallest, -3e38]):
        x = torch.tensor(values).reshape(1, 1, -1)
        for backend in BACKENDS:
            check(histogram_of(x, None, backend)[0], np.array(values, np.float32))


def test_each_parameter_has_bins_of_its_own() -> None:
    """(num_observations, heads, 1, 1, head_dim), heads of different magnitudes; and blocks."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(50, 3, 1, 1, 16, generator=generator)
    x *= torch.tensor([1e-3, 1.0, 500.0]).reshape(1, 3, 1, 1, 1)
    blocks = torch.randn(1, 2, 3, 4, 5, generator=generator)
    for backend in BACKENDS:
        found = histogram_of(x, None, backend)
        assert found.shape == (3, 1, 1, 1 + BINS)
        for head in range(3):
            check(found[head, 0, 0], x[:, head].flatten().numpy())
        found = add_values(None, blocks, range_of(blocks, 2), 2, backend)
        check(found[1, 2], blocks[0, 1, 2].flatten().numpy())
