"""`range_of` against NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from steelyard.kernels.range import compute_dtype, range_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SHAPES = [(1, 1, 1), (1, 1, 7), (5, 1, 3), (1, 4, 3, 8), (6, 3, 1), (2, 3, 2, 4, 5)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_range_is_that_of_numpy(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    observed = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    low, high = range_of(observed)
    numbers = observed.double().numpy()
    for actual, expected in ((low, numbers.min((0, -1))), (high, numbers.max((0, -1)))):
        assert actual.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert tuple(actual.shape) == shape[1:-1]
        np.testing.assert_array_equal(actual.numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_range_keeps_the_ends_of_the_type(dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    observed = torch.tensor([[[info.min, info.max], [least, 2 * least], [-least, 0]]], dtype=dtype)
    low, high = range_of(observed)
    np.testing.assert_array_equal(low.numpy(), [info.min, least, -least])
    np.testing.assert_array_equal(high.numpy(), [info.max, 2 * least, 0])


def test_float64_is_not_narrowed() -> None:
    low, high = range_of(torch.tensor([[[1 + 1e-12, 1e300]]], dtype=torch.float64))
    assert (low.item(), high.item()) == (1 + 1e-12, 1e300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("place", [(0, 1, 0), (1, 1, 2), (2, 1, 3)])
def test_nan_spoils_its_own_group_only(dtype: torch.dtype, place: tuple[int, int, int]) -> None:
    observed = torch.arange(36.0).reshape(3, 3, 4).to(dtype)
    clean = range_of(observed)
    observed[place] = float("nan")
    low, high = range_of(observed)
    assert (torch.isnan(low) | torch.isnan(high)).tolist() == [False, True, False]
    for actual, expected in zip((low, high), clean, strict=True):
        torch.testing.assert_close(actual[[0, 2]], expected[[0, 2]], rtol=0, atol=0)


def test_infinity_is_kept() -> None:
    low, high = range_of(torch.tensor([[[1.0, float("inf")], [float("-inf"), 0]]]))
    assert low.tolist() == [1, float("-inf")]
    assert high.tolist() == [float("inf"), 0]


def test_observed_is_not_modified_nor_shared() -> None:
    observed = torch.ones(1, 1, 1)
    low, high = range_of(observed)
    low.zero_(), high.zero_()
    assert observed.item() == 1


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_layout_does_not_matter(dtype: torch.dtype) -> None:
    base = torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    for view in (base.transpose(0, 1), base[:, ::2], base[:1].expand(3, 6, 5)):
        for actual, expected in zip(range_of(view), range_of(view.contiguous()), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)


def test_compute_dtype() -> None:
    assert [compute_dtype(d) for d in DTYPES] == [torch.float32] * 3 + [torch.float64]
