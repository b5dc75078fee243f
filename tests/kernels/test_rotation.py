"""Hadamard matrices and rotations; the oracles are the definition, and dense products in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.kernels.hadamard import hadamard_factors, hadamard_matrix
from steelyard.kernels.rotation import make_rotation

KINDS = ["hadamard", "random-hadamard", "random-matrix"]


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 24, 28, 36, 44, 60, 76, 84, 108, 140, 148])
def test_a_hadamard_matrix_has_signs_and_orthogonal_rows(order: int) -> None:
    made = hadamard_matrix(order)
    assert made is not None
    assert set(made.unique().tolist()) <= {-1.0, 1.0}
    assert_close(made @ made.T, order * torch.eye(order, dtype=torch.float64))


@pytest.mark.parametrize("order", [3, 6, 10, 16, 52, 92])
def test_other_orders_have_none_of_their_own(order: int) -> None:
    """16 is a product, 52 and 92 need other constructions."""
    made = hadamard_matrix(order)
    assert made is None


@pytest.mark.parametrize("size", [288, 576, 640, 896, 1536])
def test_sizes_of_models_have_hadamard_factors(size: int) -> None:
    factors = hadamard_factors(size)
    assert factors is not None and np.prod([len(each) for each in factors]) == size
    rows = (
        torch.kron(*factors)
        if len(factors) == 2
        else torch.kron(factors[0], torch.kron(*factors[1:]))
    )
    assert_close(rows[:3] @ rows.T, (size * torch.eye(size, dtype=torch.float64))[:3])


def test_a_power_of_two_is_the_matrix_of_compressed_tensors() -> None:
    ours = make_rotation("hadamard", 128).matrix() * 128**0.5
    assert_close(ours, deterministic_hadamard_matrix(128, torch.float64))


@given(
    st.sampled_from(KINDS),
    st.integers(1, 60),
    st.integers(1, 3),
    st.sampled_from([0, 1]),
    st.integers(0, 99),
)
def test_a_rotation_is_orthogonal_and_works_in_blocks(
    kind: str, size: int, blocks: int, dim: int, seed: int
) -> None:
    rotation = make_rotation(kind, size, str(seed))
    dense = rotation.matrix().numpy()
    np.testing.assert_allclose(dense @ dense.T, np.eye(size), atol=1e-12)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(blocks * size, blocks * size, generator=generator, dtype=torch.float64)
    wide = np.kron(np.eye(blocks), dense)
    expected = x.numpy() @ wide if dim else wide.T @ x.numpy()
    np.testing.assert_allclose(rotation.rotate(x, dim).numpy(), expected, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_rotation_and_another_seed_another(kind: str) -> None:
    one, again = (make_rotation(kind, 52, "R2 model.layers.0").matrix() for _ in range(2))
    assert torch.equal(one, again)
    other = make_rotation(kind, 52, "R2 model.layers.1").matrix()
    assert not torch.equal(one, other)  # 52 has no Hadamard matrix: a factor of it is random


def test_threads_change_no_bit() -> None:
    x = torch.randn(33, 288, generator=torch.Generator().manual_seed(0))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            found += [make_rotation(kind, 288).rotate(x).float() for kind in KINDS]
    finally:
        torch.set_num_threads(before)
    for one, other in zip(found[:3], found[3:], strict=True):
        assert torch.equal(one, other)
