"""GPTQ is never worse than rounding to nearest, and is packed to what it has chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import FORMATS, decoded, loss_of, nearest, packed, qparams_of, solved
from gptq_strategies import COLUMNS, ROWS, every_format, problems
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.gptq_rounding import activation_order


@every_format
@settings(max_examples=60)
@given(problem=problems())
def test_never_worse_than_rounding_to_nearest(
    args: QuantizationArgs, problem: dict[str, Any]
) -> None:
    weight, hessian = problem.pop("weight"), problem.pop("hessian")
    order = activation_order(hessian) if problem.pop("ordered") else None
    result = solved(weight, hessian, args, order=order, **problem)
    stored = decoded(packed(result.weight, weight, args), weight, args)
    ours, theirs = loss_of(weight, stored, hessian), loss_of(weight, nearest(weight, args), hessian)
    # of H itself, fp64 sees only what fp32 has left: an indefinite H may have errors below zero
    floor = 1e-6 * float(hessian.double().abs().max()) * weight.double().square().sum(1)
    assert bool((ours <= theirs + 1e-9 * theirs.abs() + 1e-9 * floor).all()), (ours, theirs)
    assert result.loss <= result.nearest_loss
    assert bool(result.weight.isfinite().all())
    # what is returned is what will be decoded, or, rarely, a weight that was left as it was
    left = stored != result.weight
    assert torch.equal(result.weight[left], weight[left])
    assert result.dead_columns == int((hessian.diagonal() == 0).sum())


@settings(max_examples=40)
@given(seed=st.integers(0, 2**31), backend=st.sampled_from(["reference", "compiled"]))
def test_rows_are_independent(seed: int, backend: str) -> None:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    x = torch.randn(64, 3, generator=generator) @ torch.randn(3, COLUMNS, generator=generator)
    hessian = x.t() @ x
    args = FORMATS["int4_group"]
    together = solved(weight, hessian, args, backend=backend)
    alone = [solved(weight[r : r + 1], hessian, args, backend=backend) for r in range(ROWS)]
    same = torch.cat([a.weight for a in alone]) == together.weight
    # matrix products of other shapes sum in other orders, so a tie may go the other way
    assert int(same.all(1).sum()) >= ROWS - 1
    assert sum(a.loss for a in alone) == pytest.approx(together.loss, rel=0.1)


def test_scales_are_those_that_were_given() -> None:
    weight = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(0))
    scale, _, _ = qparams_of(weight, FORMATS["int4_group"])
    result = solved(weight, torch.eye(COLUMNS), FORMATS["int4_group"])
    codes = result.weight / scale.repeat_interleave(16, 1)
    torch.testing.assert_close(codes, codes.round(), rtol=0, atol=1e-5)
