"""Hessians of inputs against float64."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from steelyard.kernels.hessian import (
    accumulate,
    empty_slab,
    output_square,
    slab_starts,
    symmetric,
)


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(*batches: torch.Tensor) -> torch.Tensor:
    columns = batches[0].shape[-1]
    slabs = [empty_slab(columns, start) for start in slab_starts(columns)]
    for x in batches:
        accumulate(slabs, x)
    return symmetric(slabs)


@pytest.mark.parametrize("columns", [1, 7, 128, 256, 300, 513])
def test_oracle(columns: int) -> None:
    batches = [inputs(66, columns, seed=i) for i in range(3)]
    tokens = torch.cat(batches).double()
    # relative to the norms of the columns, since entries off the diagonal cancel
    norms = tokens.square().sum(0).sqrt()
    got = hessian_of(*batches).double() / norms / norms.unsqueeze(1)
    assert_close(got, tokens.t() @ tokens / norms / norms.unsqueeze(1), rtol=0, atol=1e-6)


def test_slabs_hold_half_of_the_matrix() -> None:
    slabs = [empty_slab(1024, start) for start in slab_starts(1024)]
    assert sum(slab.numel() for slab in slabs) == 1024 * (1024 + 128) // 2


def test_is_symmetric_and_the_same_each_time() -> None:
    x = inputs(64, 600)
    first = hessian_of(x)
    assert torch.equal(first, first.t())
    assert torch.equal(first, hessian_of(x.clone()))


def test_no_tokens() -> None:
    assert not hessian_of(torch.zeros(0, 5)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (40, 300), (300, 129)])
def test_output_square_is_that_of_the_outputs(shape: tuple[int, int], dtype: torch.dtype) -> None:
    weight, x = inputs(*shape).to(dtype), inputs(64, shape[1], seed=1)
    outputs = x.double() @ weight.double().t()
    found = output_square(weight, x.t() @ x)
    assert found == pytest.approx(float(outputs.square().sum()), rel=1e-5)
