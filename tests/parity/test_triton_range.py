"""Triton's ranges, interpreted, against the reference."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from steelyard.kernels.range import range_of

pytestmark = pytest.mark.usefixtures("interpreter")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 7, 13), (1, 5, 3, 128), (1, 1, 9001), (300, 1, 70), (40, 6, 32), (9, 4, 1, 1, 24)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_range(shape: tuple[int, ...]) -> None:
    for dtype in DTYPES:
        x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
        if dtype == torch.bfloat16:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        got, expected = (range_of(x, 1, b) for b in ("triton", "reference"))
        assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("n", [1, 100, 1 << 14])
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
def test_range_shows_what_is_not_finite(n: int, value: float) -> None:
    for dtype in DTYPES:
        x = torch.zeros(1, 1, n, dtype=dtype)
        x[0, 0, n // 2] = value
        low, high = range_of(x, 1, "triton")
        assert not bool(torch.isfinite(low) & torch.isfinite(high))


def test_range_at_the_ends_of_the_type() -> None:
    for dtype in DTYPES:
        info = torch.finfo(dtype)
        least = info.smallest_normal * info.eps
        x = torch.tensor([[[info.min, info.max], [least, -least], [info.tiny, 0.0]]], dtype=dtype)
        assert_close(range_of(x, 1, "triton"), range_of(x, 1, "reference"), rtol=0, atol=0)


@pytest.mark.parametrize("block", [(3, 32), (128, 128), (7, 2)], ids=str)
def test_range_of_blocks(block: tuple[int, int]) -> None:
    rows, columns = block
    x = torch.randn(2 * rows, 5 * columns, generator=torch.Generator().manual_seed(2))
    blocks = x.view(2, rows, 5, columns).transpose(1, 2).unsqueeze(0)
    got, expected = (range_of(blocks, 2, b) for b in ("triton", "reference"))
    assert_close(got, expected, rtol=0, atol=0)
