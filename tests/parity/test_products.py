"""Products of inputs, summed over tokens, at each instruction set; against float64.

The compiled sums round at each step: at most 256 times in a block of tokens, and once for each
block when it is added. An entry is therefore off by at most that many times 2^-24 of the sum of its
terms' magnitudes. Instructions on bf16 take numbers below 2^-126 for zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch.testing import assert_close

from steelyard.kernels.hessian import accumulate, accumulate_product, empty_slab, slab_starts

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def inputs(tokens: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, columns, generator=generator)
    return (x * torch.logspace(-2, 2, columns)).to(dtype)


def upper(x: torch.Tensor, starts: Sequence[int] | None = None) -> torch.Tensor:
    """The upper triangle of x^T x, with slabs that begin at `starts`."""
    columns = x.shape[1]
    starts = list(slab_starts(columns)) if starts is None else list(starts)
    ends = [*starts[1:], columns]
    slabs = [torch.zeros(e - s, columns - s) for s, e in zip(starts, ends, strict=True)]
    accumulate(slabs, x, "compiled")
    whole = torch.zeros(columns, columns)
    for start, slab in zip(starts, slabs, strict=True):
        whole[start : start + len(slab), start:] = slab
    return whole.triu()


def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    rows, columns = left.shape[1], right.shape[1]
    starts = slab_starts(rows)
    slabs = [torch.zeros(min(128, rows - s), columns) for s in starts]
    accumulate_product(slabs, starts, left, right, "compiled")
    return torch.cat(slabs)


def assert_near(got: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    left, right = left.double(), right.double()
    blocks = len(left) // 128 + 1
    bound = (256 + blocks) * 2.0**-24 * (left.abs().t() @ right.abs()) + len(left) * 2.0**-125
    error = (got.double() - left.t() @ right).abs()
    assert bool((error <= bound).all()), float((error / bound).max())


@every_dtype
@pytest.mark.parametrize("columns", [1, 7, 33, 300])
@pytest.mark.parametrize("tokens", [0, 1, 127, 513])
def test_products(product_isa: str, tokens: int, columns: int, dtype: torch.dtype) -> None:
    x, other = inputs(tokens, columns, dtype), inputs(tokens, columns, dtype, 1)
    whole = upper(x)
    assert_near(whole + whole.triu(1).t(), x, x)
    assert_near(product(other, x), other, x)


@every_dtype
@pytest.mark.parametrize(("rows", "columns"), [(5, 300), (130, 40)])
def test_product_of_any_shape(
    product_isa: str, rows: int, columns: int, dtype: torch.dtype
) -> None:
    left, right = inputs(70, rows, dtype), inputs(70, columns, dtype, 1)
    assert_near(product(left, right), left, right)


@every_dtype
def test_any_split_into_slabs_has_the_same_bits(product_isa: str, dtype: torch.dtype) -> None:
    if product_isa == "baseline":
        pytest.skip("torch multiplies")
    x = inputs(300, 200, dtype)
    whole = upper(x)
    for starts in ([0], [0, 1, 3, 64, 65, 199], range(0, 200, 10)):
        assert_close(upper(x, list(starts)), whole, rtol=0, atol=0)
    both = product(x, x)
    assert_close(both.triu(), whole, rtol=0, atol=0)  # a product of x with itself


def test_sums_go_on_where_they_were(product_isa: str) -> None:
    x = inputs(64, 150, torch.bfloat16)
    slabs = [empty_slab(150, start) for start in slab_starts(150)]
    for _ in range(2):
        accumulate(slabs, x, "compiled")
    assert_close(slabs[0].triu(), 2 * upper(x)[:128], rtol=1e-6, atol=0)


def test_rows_and_columns_may_be_strided(product_isa: str) -> None:
    x = inputs(40, 90, torch.bfloat16)
    padded = torch.cat((x, x), dim=1)[:, :90]
    assert_close(upper(padded), upper(x), rtol=0, atol=0)
    turned = x.t().contiguous().t()
    assert_close(upper(turned), upper(x), rtol=0, atol=0)


def test_two_types_are_multiplied_in_fp32(product_isa: str) -> None:
    left, right = inputs(40, 90, torch.float32), inputs(40, 90, torch.bfloat16, 1)
    assert_near(product(left, right), left, right)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_hide_nothing(product_isa: str, dtype: torch.dtype, value: float) -> None:
    x = torch.ones(5, 70, dtype=dtype)
    x[3, 41] = value
    found = upper(x)
    assert not bool(found[:42, 41].isfinite().any())
    assert bool(found[:, 42:].isfinite()[:41].all())


def test_subnormal_inputs_are_as_good_as_zero(product_isa: str) -> None:
    """Their products are far below what fp32 holds, whatever the instruction does with them."""
    x = torch.full((64, 40), 2.0**-130, dtype=torch.bfloat16)
    assert not bool(upper(x).any())


@pytest.mark.parametrize("slabs", [[(3, 5)], [(4, 4), (4, 2)]])
def test_wrong_slabs_are_refused(isa: str, slabs: list[tuple[int, int]]) -> None:
    if isa == "baseline":
        pytest.skip("torch multiplies")
    x = torch.zeros(2, 4)
    with pytest.raises(ValueError, match=r"a slab must hold|no such rows"):
        accumulate([torch.zeros(shape) for shape in slabs], x, "compiled")


@every_dtype
@pytest.mark.parametrize("columns", [1, 33, 300])
@pytest.mark.parametrize("tokens", [0, 1, 513])
def test_fresh_slabs_are_written(
    product_isa: str, tokens: int, columns: int, dtype: torch.dtype
) -> None:
    """The sums are those that zeros get, whatever the slabs held."""
    x, left = inputs(tokens, columns, dtype), inputs(tokens, 50, dtype, 1)
    slabs = [empty_slab(columns, start).fill_(7.0) for start in slab_starts(columns)]
    accumulate(slabs, x, "compiled", fresh=True)
    whole = torch.zeros(columns, columns)
    for start, slab in zip(slab_starts(columns), slabs, strict=True):
        whole[start : start + len(slab), start:] = slab
    assert torch.equal(whole.triu(), upper(x))
    rows = [torch.full((50, columns), 7.0)]
    accumulate_product(rows, [0], left, x, "compiled", fresh=True)
    assert torch.equal(rows[0], product(left, x))
