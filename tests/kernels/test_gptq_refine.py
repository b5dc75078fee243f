"""Steps of refining against enumeration and least squares in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import DTYPES, FORMATS, hessian_of, loss_of, qparams_of, solved, weight_of
from torch.testing import assert_close

from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_refine import ScaleSteps, refine, refine_block
from steelyard.kernels.gptq_rounding import activation_order, solve
from steelyard.kernels.optimal_search import scale_codes

both_backends = pytest.mark.parametrize("backend", ["reference", "compiled"])
both = pytest.mark.parametrize("fast", [False, True], ids=["reference", "compiled"])


def problem(args: QuantizationArgs, rows: int = 9, columns: int = 32) -> dict[str, Any]:
    """A weight that is rounded to nearest, and what refining takes."""
    weight, hessian = weight_of(rows, columns), hessian_of(columns)
    scale, zero_point, global_scale = qparams_of(weight, args)
    grid = Grid.of(weight, scale, zero_point, args, global_scale, False, None)
    return {
        "target": weight.t().contiguous(),
        "hessian": hessian,
        "grid": grid,
        "values": grid.stored(weight).t().contiguous(),
        "steps": ScaleSteps.of(args, scale, global_scale),
    }


def error_of(given: dict[str, Any], values: torch.Tensor) -> torch.Tensor:
    return loss_of(given["target"].t(), values.t(), given["hessian"])


@pytest.mark.parametrize("name", ["int4_group", "int4_asym_channel", "NVFP4A16"])
def test_a_code_becomes_the_best_of_all(name: str) -> None:
    """One column, every code that there is; the others as they are."""
    given = problem(FORMATS[name], columns=16)
    grid, hessian = given["grid"], given["hessian"]
    values, errors = given["values"].clone(), given["target"] - given["values"]
    before = values.clone()
    one = slice(0, 1)
    refine_block(
        hessian[one, one],
        (hessian @ errors)[one],
        grid.columns(one),
        given["steps"],
        values[one],
        errors[one],
        False,
    )
    codes = torch.arange(-8.0, 8) if grid.args.type == "int" else torch.arange(-12.0, 13) / 2
    tried = []
    for code in codes:
        other = before.clone()
        zero = 0 if grid.zero_point is None else grid.zero_point[0]
        other[0] = grid.nearest((code - zero) * grid.scale[0], 0)
        tried.append(error_of(given, other))
    assert_close(error_of(given, values), torch.stack(tried).amin(0), rtol=1e-5, atol=0)


@both
@pytest.mark.parametrize("name", ["int4_group", "int4_asym_group", "int4_asym_channel"])
def test_a_scale_becomes_that_of_least_squares(name: str, fast: bool) -> None:
    given = problem(FORMATS[name], columns=16)
    codes = given["values"] / given["grid"].scale[given["grid"].group]
    u, target, h = (t.double() for t in (codes.round(), given["target"], given["hessian"]))
    expected = (u * (h @ target)).sum(0) / (u * (h @ u)).sum(0)
    # columns that no error can improve: the codes stay, and only scales move
    _, grid = refine(**{**given, "values": given["values"].clone()}, rounds=1, fast=fast)
    assert_close(grid.scale[0].double(), expected, rtol=1e-4, atol=0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8])
def test_the_next_scale_is_the_next_that_can_be_stored(dtype: torch.dtype) -> None:
    codes = scale_codes(dtype).float()
    codes = codes[1:-1] if dtype == torch.uint8 else codes  # 2^-127 is no normal fp32
    low, high = ScaleSteps(dtype, None).beside(codes)
    assert_close(high[:-1], codes[1:], rtol=0, atol=0)
    assert_close(low[1:], codes[:-1], rtol=0, atol=0)
    if dtype != torch.uint8:
        assert (low[0], high[-1]) == (codes[0], codes[-1])


@both_backends
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_result_is_what_its_scale_decodes(name: str, dtype: torch.dtype, backend: str) -> None:
    """Rounding the result to nearest with its own scale changes nothing."""
    args = FORMATS[name]
    weight, hessian = weight_of(21, 96, dtype), hessian_of(96)
    scale, zero_point, global_scale = qparams_of(weight, args)
    plain = solved(weight, hessian, args, backend=backend)
    result = solved(weight, hessian, args, rounds=2, backend=backend)
    assert (result.scale.dtype, result.scale.shape) == (scale.dtype, scale.shape)
    grid = Grid.of(weight, result.scale, zero_point, args, global_scale, False, None)
    left = grid.stored(result.weight) != result.weight  # 7 and 8 bits in bf16, rounded to nearest
    assert torch.equal(result.weight[left], weight[left])
    assert int(left.any(1).sum()) <= result.nearest_rows
    loss = float(loss_of(weight, grid.stored(result.weight), hessian).sum())
    assert loss == pytest.approx(result.loss, rel=1e-4)
    assert result.loss < plain.loss
    assert result.nearest_loss == pytest.approx(plain.nearest_loss, rel=1e-3)


@both_backends
def test_groups_that_lie_apart(backend: str) -> None:
    args = FORMATS["int4_group"]
    weight, hessian = weight_of(10, 64), hessian_of(64)
    g_idx = torch.randperm(64, generator=torch.Generator().manual_seed(3)) // 16
    together = torch.argsort(g_idx, stable=True)
    scale, _, _ = qparams_of(weight[:, together], args)
    apart = solve(weight, hessian, scale, None, args, g_idx=g_idx, rounds=2, backend=backend)
    beside = solve(
        weight[:, together],
        hessian[together][:, together],
        scale,
        None,
        args,
        order=torch.argsort(together),
        rounds=2,
        backend=backend,
    )
    assert torch.equal(apart.weight[:, together], beside.weight)
    assert torch.equal(apart.scale, beside.scale)


@both_backends
def test_without_rounds_scales_are_those_given(backend: str) -> None:
    args = FORMATS["int4_group"]
    weight, hessian = weight_of(10, 64), hessian_of(64)
    scale, _, _ = qparams_of(weight, args)
    result = solve(weight, hessian, scale, None, args, rounds=0, backend=backend)
    assert torch.equal(result.scale, scale)


@both_backends
def test_a_negative_scale_stays_negative(backend: str) -> None:
    args = FORMATS["int4_group"]
    weight, hessian = weight_of(10, 64), hessian_of(64)
    scale, _, _ = qparams_of(weight, args)
    result = solve(weight, hessian, -scale, None, args, rounds=2, backend=backend)
    assert bool((result.scale < 0).all()) and not torch.equal(result.scale, -scale)
    assert float(loss_of(weight, result.weight, hessian).sum()) == pytest.approx(result.loss)


@both_backends
def test_a_target_is_what_the_result_stands_for(backend: str) -> None:
    args = FORMATS["int4_group"]
    weight, hessian = weight_of(30, 64), hessian_of(64)
    target = weight + 0.02 * weight_of(30, 64, seed=9)
    order = activation_order(hessian)
    options: dict[str, Any] = {"order": order, "rounds": 2, "backend": backend}
    same = solved(weight, hessian, args, target=weight.clone(), **options)
    plain = solved(weight, hessian, args, **options)
    assert torch.equal(same.weight, plain.weight) and torch.equal(same.scale, plain.scale)
    moved = solved(weight, hessian, args, target=target, **options)
    assert float(loss_of(target, moved.weight, hessian).sum()) == pytest.approx(
        moved.loss, rel=1e-4
    )
    assert float(loss_of(target, moved.weight, hessian).sum()) < float(
        loss_of(target, plain.weight, hessian).sum()
    )


def test_wide_groups_are_fitted_outside_of_blocks() -> None:
    """A channel of 320 columns, beside the same as one group that fits into a block."""
    given = problem(FORMATS["int4_asym_channel"], columns=320)
    wide, _ = refine(**{**given, "values": given["values"].clone()}, rounds=1, fast=False)
    assert bool((error_of(given, wide) <= error_of(given, given["values"])).all())
    fitted, grid = refine(**{**given, "values": given["values"].clone()}, rounds=1, fast=True)
    assert_close(fitted, wide, rtol=0, atol=0)
    assert not torch.equal(grid.scale, given["grid"].scale)
