"""Triton's blocks of GPTQ, interpreted, against the reference.

Both sum in fp32, but not in the same order: see test_gptq.py. None of the rows here differed when
this was written.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import FORMATS, hessian_of, qparams_of, solved, weight_of
from torch.testing import assert_close

from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_refine import ScaleSteps, refine_block
from steelyard.kernels.gptq_rounding import activation_order, round_block

triton_blocks = pytest.importorskip("steelyard.kernels.triton_blocks")
pytestmark = pytest.mark.usefixtures("interpreter")


def grid_of(weight: torch.Tensor, args: QuantizationArgs) -> Grid:
    scale, zero_point, global_scale = qparams_of(weight, args)
    return Grid.of(weight, scale, zero_point, args, global_scale, False, "auto")


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (40, 3), (20, 48)])
@pytest.mark.parametrize("name", ["int4_asym_channel", "int8_channel", "fp8_tensor"])
def test_block(name: str, rows: int, columns: int) -> None:
    """Types of weights in turn; 8-bit integers of bf16 are those whose codes are checked."""
    dtype = {1: torch.float32, 3: torch.float16, 48: torch.bfloat16}[columns]
    weight = weight_of(rows, columns, dtype)
    generator = torch.Generator().manual_seed(columns)
    lower = torch.linalg.cholesky(hessian_of(columns) / columns)
    sums = torch.randn(columns, rows, generator=generator) * 0.01
    added = torch.rand(columns, generator=generator)
    grid, original = grid_of(weight, FORMATS[name]), weight.float().t().contiguous()
    results = []
    for run in (triton_blocks.gptq_block, round_block):
        out = torch.empty(columns, rows), torch.empty(columns, rows)
        losses = torch.ones(rows, dtype=torch.float64)  # they are added to
        run(original, lower, sums, added, grid, *out, losses)
        results.append((*out, losses))
    for ours, theirs in zip(*results, strict=True):
        assert_close(ours, theirs, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("name", ["int4_group", "int4_asym_group", "NVFP4A16", "MXFP4A16"])
def test_refine_block(name: str) -> None:
    """One block, groups and all: scales, values and errors are those of the reference."""
    args = FORMATS[name]
    dtype = torch.bfloat16 if args.type == "int" else torch.float32
    rows, columns = (40, 48) if name == "int4_group" else (20, 32)
    weight, hessian = weight_of(rows, columns, dtype), hessian_of(columns) / columns
    scale, _, global_scale = qparams_of(weight, args)
    results = []
    for run in (triton_blocks.refine_block, refine_block):
        grid = grid_of(weight, args)
        values = grid.stored(weight).float().t().contiguous()
        errors = weight.float().t().contiguous() - values
        steps = ScaleSteps.of(args, scale, global_scale)
        run(hessian, hessian @ errors, grid, steps, values, errors, True)
        results.append((grid.scale, values, errors))
    same = torch.stack([alike(a, b).all(0) for a, b in zip(*results, strict=True)]).all(0)
    assert int((~same).sum()) <= 1
    assert bool((results[0][0] != grid_of(weight, args).scale).any()), "no scale moved"


@pytest.mark.parametrize("name", ["int4_group", "int8_asym_block", "fp8_channel"])
def test_solve(name: str) -> None:
    weight, hessian = weight_of(20, 48, torch.bfloat16), hessian_of(48)
    given = {"order": activation_order(hessian), "block_size": 32, "rounds": name == "int4_group"}
    ours, theirs = (
        solved(weight, hessian, FORMATS[name], backend=backend, **given)
        for backend in ("triton", "reference")
    )
    differs = (~alike(ours.weight, theirs.weight)).any(1)
    assert int(differs.sum()) <= 1
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-2 if differs.any() else 1e-6)
    assert ours.nearest_loss == pytest.approx(theirs.nearest_loss, rel=1e-5)


def alike(ours: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
    """Whether values have the same codes: a scale of fp32 may differ in its last bits."""
    return (ours - theirs).abs() <= 1e-5 * theirs.abs() + 1e-7
