"""Steps of refining against enumeration and least squares in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from gptq_problems import DTYPES, FORMATS, hessian_of, loss_of, qparams_of, solved, weight_of
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.kernels import compiled_gptq
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_refine import ScaleSteps, refine, refine_block
from steelyard.kernels.gptq_rounding import activation_order, solve
from steelyard.kernels.optimal_search import scale_codes

both_backends = pytest.mark.parametrize("backend", ["reference", "compiled"])
both = pytest.mark.parametrize("fast", [False, True], ids=["reference", "compiled"])


def problem(
    args: QuantizationArgs,
    rows: int = 9,
    columns: int = 32,
    stored: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Any]:
    """A weight that is rounded to nearest, and what refining takes.

    stored: the type of scales, where the format leaves it to the weight
    """
    weight, hessian = weight_of(rows, columns, seed=seed), hessian_of(columns, seed=seed + 1)
    scale, zero_point, global_scale = qparams_of(weight, args)
    scale = scale.to(stored) if args.scale_dtype is None else scale
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
    _, grid = refine(
        **{**given, "values": given["values"].clone()},
        rounds=1,
        run_block=None if fast else refine_block,
    )
    assert_close(grid.scale[0].double(), expected, rtol=1e-4, atol=0)


STORED = [
    ("int4_group", torch.bfloat16),
    ("int4_group", torch.float16),
    ("int4_asym_group", torch.bfloat16),
    ("NVFP4A16", torch.float8_e4m3fn),
    ("MXFP4A16", torch.uint8),
    ("MXFP8A16", torch.uint8),
]
every_stored = pytest.mark.parametrize(("name", "dtype"), STORED)


def with_codes(given: dict[str, Any], scale: torch.Tensor) -> torch.Tensor:
    """Give the codes of a problem with one group another scale; return them, (columns, rows)."""
    grid = given["grid"]
    codes = (given["values"] / grid.scale[0]).double()
    codes = codes.round() if grid.args.type == "int" else codes
    if grid.args.type == "float":
        assert_close(codes * 2**9, (codes * 2**9).round(), rtol=0, atol=1e-3)
    grid.scale[0] = scale
    given["values"] = (codes * scale).float()
    return codes


def errors_of_scales(given: dict[str, Any], codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return every scale that can be stored, and the errors with fixed codes; (scales, rows)."""
    steps, h, w = given["steps"], given["hessian"].double(), given["target"].double()
    scales = scale_codes(steps.dtype) / (1.0 if steps.divisor is None else float(steps.divisor))
    whole, cross, square = ((a * (h @ b)).sum(0) for a, b in ((w, w), (codes, w), (codes, codes)))
    s = scales.unsqueeze(1)
    return scales, whole - 2 * s * cross + s.square() * square


def run_block(given: dict[str, Any], fast: bool) -> None:
    hessian, target, grid, steps, values = (
        given[name] for name in ("hessian", "target", "grid", "steps", "values")
    )
    if fast:
        compiled_gptq.refine(hessian, target, grid, steps, values, True, len(target))
        return
    errors = target - values
    refine_block(hessian, hessian @ errors, grid, steps, values, errors, True)


@both
@pytest.mark.parametrize("away", [1.0, 1.4, 0.45])
@every_stored
def test_no_stored_scale_is_better(name: str, dtype: torch.dtype, away: float, fast: bool) -> None:
    """Codes that were rounded with another scale, beside every scale that can be stored."""
    args = FORMATS[name]
    given = problem(args, columns=args.group_size, stored=dtype)
    steps = given["steps"]
    codes = with_codes(given, steps.nearest(given["grid"].scale[0] * away))
    scales, tried = errors_of_scales(given, codes)
    least = tried.amin(0)
    run_block(given, fast)
    found = given["grid"].scale[0].double()
    assert_close(steps.nearest(found.float()).double(), found, rtol=0, atol=0)
    assert bool((error_of(given, given["values"]) <= least * (1 + 1e-5)).all())
    if not steps.coarse:  # else the scale may have moved on, with other codes
        place = torch.searchsorted(scales, found)
        assert_close(tried.gather(0, place.unsqueeze(0))[0], least, rtol=1e-5, atol=0)


@both
@pytest.mark.parametrize("away", [1.0, 1.4])
@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16"])
def test_a_coarse_scale_is_the_best_with_its_own_codes(name: str, away: float, fast: bool) -> None:
    """Where columns do not interact, every code of every column can be tried for each scale."""
    args = FORMATS[name]
    given = problem(args, rows=40, columns=args.group_size)
    given["hessian"] = given["hessian"].diagonal().diag().contiguous()
    codes = with_codes(given, given["steps"].nearest(given["grid"].scale[0] * away))
    scales, tried = errors_of_scales(given, codes)
    fitted = tried.argmin(0)
    every = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    every = torch.cat((-every, every))
    off = given["target"].double().unsqueeze(2)
    weights, best = given["hessian"].diagonal().double().unsqueeze(1), []
    for place in (fitted - 1, fitted, fitted + 1):
        values = scales[place.clamp(max=len(scales) - 1)].unsqueeze(1) * every  # (rows, codes)
        best.append(((off - values).square().amin(2) * weights).sum(0))
    run_block(given, fast)
    least = torch.stack(best).amin(0)
    assert_close(error_of(given, given["values"]), least, rtol=1e-5, atol=0)
    assert bool((torch.stack(best).argmin(0) != 1).any())


@settings(max_examples=20, deadline=None)
@over(
    st.sampled_from(
        [*STORED, ("int4_asym_channel", torch.bfloat16), ("int3_group", torch.float32)]
    ),
    st.integers(0, 2**16),
    st.booleans(),
)
def test_no_round_makes_a_row_worse(stored: tuple[str, torch.dtype], seed: int, fast: bool) -> None:
    name, dtype = stored
    given = problem(FORMATS[name], rows=5, stored=dtype, seed=seed)
    before = start = error_of(given, given["values"])
    for _ in range(3):
        given["values"], given["grid"] = refine(
            **given, rounds=1, run_block=None if fast else refine_block
        )
        after = error_of(given, given["values"])
        assert bool((after <= before * (1 + 1e-5)).all())
        before = after
    assert bool((before < start).all())


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
    wide, _ = refine(
        **{**given, "values": given["values"].clone()}, rounds=1, run_block=refine_block
    )
    assert bool((error_of(given, wide) <= error_of(given, given["values"])).all())
    fitted, grid = refine(**{**given, "values": given["values"].clone()}, rounds=1, run_block=None)
    assert_close(fitted, wide, rtol=0, atol=0)
    assert not torch.equal(grid.scale, given["grid"].scale)
