"""GPTQ is never worse than rounding to nearest, and is packed to what it has chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import FORMATS, decoded, loss_of, nearest, packed, qparams_of, solved
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.gptq_rounding import activation_order

ROWS, COLUMNS = 6, 32
NAMES = [
    "int2_group",
    "int3_asym_group",
    "int4_group",
    "int4_asym_channel",
    "int4_tensor",
    "int8_channel",
    "int8_asym_block",
    "fp8_block",
    "fp8_channel",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
]
every_format = pytest.mark.parametrize("args", [FORMATS[n] for n in NAMES], ids=NAMES)


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Weights and inputs: correlated or not, fewer tokens than columns, of all sizes, dead ones."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    dtype = draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    weight = torch.randn(ROWS, COLUMNS, generator=generator)
    weight *= draw(st.sampled_from([1e-3, 0.05, 1.0, 100.0]))
    if draw(st.booleans()):  # an outlier, zeros, and a row of the same number
        weight[0, 3] *= 50
        weight[1, :20] = 0
        weight[2] = weight[2, 0]
    tokens = draw(st.sampled_from([1, 3, COLUMNS // 2, COLUMNS, 4 * COLUMNS]))
    x = torch.randn(tokens, COLUMNS, generator=generator)
    rank = draw(st.sampled_from([0, 1, 5]))
    if rank:
        x *= draw(st.sampled_from([0.0, 1e-3, 0.3]))
        shared = torch.randn(tokens, rank, generator=generator)
        x += shared @ torch.randn(rank, COLUMNS, generator=generator)
    if draw(st.booleans()):  # columns of very different sizes
        x *= torch.logspace(-3, 3, COLUMNS)[torch.randperm(COLUMNS, generator=generator)]
    x[:, : draw(st.sampled_from([0, 1, 10, COLUMNS]))] = 0
    x *= draw(st.sampled_from([1e-15, 1.0, 1e12]))
    return {
        "weight": weight.to(dtype),
        "hessian": x.t() @ x,
        "dampening_frac": draw(st.sampled_from([0.0, 1e-4, 0.01, 1.0, 50.0])),
        "ordered": draw(st.booleans()),
        "backend": draw(st.sampled_from(["reference", "compiled"])),
        "block_size": draw(st.sampled_from([1, 8, 128])),
    }


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
