"""Triton's sums of squares and histograms, interpreted, against exact sums and the reference."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from steelyard.kernels.bin_counts import add_values
from steelyard.kernels.range import range_of
from steelyard.kernels.squares import sum_of_squares

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("shape", [(1, 1), (3, 200, 130), (700, 3)], ids=str)
def test_sum_of_squares(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
        exact = x.double().square().flatten(0, -2).sum(0)
        assert_close(sum_of_squares(x, "triton").double(), exact, rtol=1e-6, atol=0)
    strided = x.flatten(0, -2).t().contiguous().t()
    assert_close(sum_of_squares(strided, "triton"), sum_of_squares(x, "triton"), rtol=0, atol=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sum_of_squares_hides_nothing(value: float) -> None:
    x = torch.ones(4, 40)
    x[2, 3] = value
    sums = sum_of_squares(x, "triton")
    assert not bool(torch.isfinite(sums[3]))
    assert bool(torch.isfinite(sums[4]))


@pytest.mark.parametrize("shape", [(1, 1, 50_000), (30, 3, 70), (5, 2, 1, 24)], ids=str)
def test_histogram(shape: tuple[int, ...]) -> None:
    """Added to twice, the second time with wider bins; zeros of both signs among the values."""
    for dtype in DTYPES if shape[0] > 1 else [torch.bfloat16]:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(7)).to(dtype)
        x.view(-1)[:4] = torch.tensor([0.0, -0.0, 1e-41, -1e-41]).to(dtype)
        found = []
        for backend in ("triton", "reference"):
            histogram = None
            for part in (x, x * 5):
                histogram = add_values(histogram, part, range_of(part), backend=backend)
            found.append(histogram)
        assert_close(*found, rtol=0, atol=0)
        assert int(found[0][..., 1:].sum()) == 2 * x.numel()
