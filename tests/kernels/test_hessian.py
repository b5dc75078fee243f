"""Second moments of inputs against float64."""

from __future__ import annotations

import pytest
import torch
from torch.testing import assert_close

from steelyard.kernels.hessian import accumulate, symmetric


def inputs(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def hessian_of(*batches: torch.Tensor) -> torch.Tensor:
    hessian = torch.zeros(batches[0].shape[-1], batches[0].shape[-1])
    for x in batches:
        accumulate(hessian, x)
    return symmetric(hessian)


@pytest.mark.parametrize("columns", [1, 7, 256, 300, 513])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_oracle(columns: int, dtype: torch.dtype) -> None:
    batches = [inputs(2, 33, columns, seed=i).to(dtype) for i in range(3)]
    tokens = torch.cat([x.reshape(-1, columns) for x in batches]).double()
    # relative to the norms of the columns, since entries off the diagonal cancel
    norms = tokens.square().sum(0).sqrt()
    got = hessian_of(*batches).double() / norms / norms.unsqueeze(1)
    assert_close(got, tokens.t() @ tokens / norms / norms.unsqueeze(1), rtol=0, atol=1e-6)


def test_half_precision_is_summed_in_fp32() -> None:
    x = torch.full((70_000, 2), 1.0, dtype=torch.bfloat16)  # bf16 would stop at 256
    assert_close(hessian_of(x), torch.full((2, 2), 70_000.0), rtol=0, atol=0)


def test_is_symmetric_and_the_same_each_time() -> None:
    x = inputs(64, 600)
    first = hessian_of(x)
    assert torch.equal(first, first.t())
    assert torch.equal(first, hessian_of(x.clone()))


def test_no_tokens() -> None:
    assert not hessian_of(torch.zeros(0, 5)).any()


@pytest.mark.parametrize("wrong", [torch.zeros(3, 3), torch.zeros(4, 4, dtype=torch.float64)])
def test_refusals(wrong: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="fp32 Hessian of 4 by 4"):
        accumulate(wrong, torch.zeros(2, 4))
