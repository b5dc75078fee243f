"""Triton's searches, interpreted, against the reference.

A search may choose otherwise only where two candidates are as good as equal: never one whose error
is more than 1e-4 above the reference's.
"""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from torch.testing import assert_close

from steelyard.kernels.grid_search import candidate_errors, search_range, shrink_factors
from steelyard.kernels.optimal_search import optimal_qparams
from steelyard.kernels.qparams import global_scale_of, qparams_from_range, scale_dtype_of
from steelyard.kernels.range import range_of
from steelyard.kernels.rounding import reconstruct
from steelyard.observers.helpers import flatten_for_calibration, view_blocks

pytestmark = pytest.mark.usefixtures("interpreter")

SCHEMES = {
    "W4A16": torch.bfloat16,
    "W4A16_ASYM": torch.float16,
    "W8A8": torch.float32,
    "FP8_DYNAMIC": torch.bfloat16,
    "NVFP4A16": torch.float16,
    "MXFP4A16": torch.bfloat16,
    "MXFP8A16": torch.float32,
}


def weight_args(scheme: str, group_size: int | None = None) -> QuantizationArgs:
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    return args if group_size is None else args.model_copy(update={"group_size": group_size})


def weight(dtype: torch.dtype, rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x *= torch.logspace(-6, 2, rows).unsqueeze(1)  # rows of all magnitudes
    x[3] = 0
    x[5, 7:] = 0
    return x.to(dtype)


def shared_scale(x: torch.Tensor, args: QuantizationArgs) -> torch.Tensor | None:
    return global_scale_of(x.abs().max().float()) if args.strategy == "tensor_group" else None


@pytest.mark.parametrize("norm", [2.0, 2.4])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_search(scheme: str, norm: float) -> None:
    """With importance where the norm is 2, and without it otherwise."""
    dtype = SCHEMES[scheme]
    args = weight_args(scheme, 48 if scheme.startswith("W4") else None)
    x = weight(dtype, 8, 64 if args.group_size in (16, 32) else 96)
    flat = flatten_for_calibration(x, "weight", args)
    scale_dtype, shared = scale_dtype_of(args, dtype), shared_scale(x, args)
    factors = [1.0, 1.25, 1.5, *shrink_factors(0.5, 64)[1:]]  # two blocks; the range expanded too
    importance = None
    if norm == 2.0:
        each = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(2))
        importance = flatten_for_calibration(each.expand(len(x), -1), "weight", args)
    found = [
        search_range(flat, args, scale_dtype, factors, norm, 0, importance, shared, backend=b)
        for b in ("triton", "reference")
    ]
    low, high = range_of(flat)
    errors = candidate_errors(flat, low, high, args, scale_dtype, factors, norm, importance, shared)
    table = torch.tensor(factors).reshape(-1, *[1] * low.ndim)
    picked = [((low * table == lo) & (high * table == hi)).int().argmax(0) for lo, hi in found]
    assert bool((low * table == found[0][0]).any(0).all()), "a range that is no candidate"
    ours, best = (errors.gather(0, p.unsqueeze(0)).squeeze(0) for p in picked)
    assert bool((ours <= best * (1 + 1e-4) + 1e-30).all())
    # powers of two are as good as their doubles where fp8 clips nothing
    assert args.scale_dtype == torch.uint8 or int((picked[0] != picked[1]).sum()) <= 1
    assert args.num_bits == 8 or bool((picked[1] > 0).any()), (
        "nothing was shrunk, so nothing was searched"
    )


@pytest.mark.parametrize("columns", [1, 7, 33, 5000])
def test_search_of_any_group_size(columns: int) -> None:
    """The longest is shared by several programs."""
    args = QuantizationArgs(num_bits=4, strategy="channel")
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    flat = flatten_for_calibration(x, "weight", args)
    both = [
        search_range(flat, args, torch.float32, shrink_factors(0.3, 20), 2.4, backend=b)
        for b in ("triton", "reference")
    ]
    assert_close(*both, rtol=0, atol=0)


@pytest.mark.parametrize("repeats", [1, 100], ids=["one_program", "shared"])
def test_patience_stops_where_the_reference_stops(repeats: int) -> None:
    args = QuantizationArgs(num_bits=3, strategy="channel")
    generator = torch.Generator().manual_seed(4)
    factors = shrink_factors(0.6, 50)
    stopped = 0
    for _ in range(5):
        x = torch.randn(1, 24, generator=generator).repeat(1, repeats)
        flat = flatten_for_calibration(x, "weight", args)
        full = search_range(flat, args, torch.float32, factors, 2.0, backend="reference")
        for patience in (1, 4) if repeats == 1 else (2,):
            both = [
                search_range(flat, args, torch.float32, factors, 2.0, patience, backend=b)
                for b in ("triton", "reference")
            ]
            assert_close(*both, rtol=0, atol=0)
            stopped += not torch.equal(both[0][1], full[1])
    assert stopped, "patience never changed an answer, so nothing was tested"


def test_tiny_and_huge_groups() -> None:
    args = QuantizationArgs(num_bits=4, strategy="channel")
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(5))
    x *= torch.tensor([1e-44, 1e-41, 1e-38, 1e-30, 1e20, 1e30, 3e37, 0.0]).unsqueeze(1)
    flat = flatten_for_calibration(x, "weight", args)
    both = [
        search_range(flat, args, torch.float32, shrink_factors(0.4, 20), 2.0, backend=b)
        for b in ("triton", "reference")
    ]
    # the first row is of a few subnormal numbers, and its candidates are as good as equal
    assert_close(*(t[1][1:] for t in both), rtol=0, atol=0)


def test_blocks_and_strided_weights() -> None:
    args = weight_args("FP8_BLOCK").model_copy(update={"block_structure": [16, 24]})
    x = weight(torch.bfloat16, 32, 48)
    flat = flatten_for_calibration(x, "weight", args)
    factors = shrink_factors(0.2, 20)
    expected = search_range(flat, args, torch.bfloat16, factors, 2.0, backend="reference")
    for blocks in (view_blocks(x, args), view_blocks(x.t().contiguous().t(), args)):
        got = search_range(
            blocks, args, torch.bfloat16, factors, 2.0, group_dims=2, backend="triton"
        )
        assert_close(got, expected, rtol=0, atol=0)


# -- exact search ---------------------------------------------------------------------------

EXACT = {
    "W4A16": (torch.bfloat16, 2.0),
    "W4A16_ASYM": (torch.bfloat16, 2.4),
    "W8A8": (torch.float32, 3.0),
    "FP8_DYNAMIC": (torch.bfloat16, 2.0),
    "NVFP4A16": (torch.float32, 2.4),
    "MXFP4A16": (torch.float16, 2.0),
}


def raised_error(
    flat: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    shared: torch.Tensor | None,
    norm: float,
    weighing: torch.Tensor | float,
) -> torch.Tensor:
    effective = scale.float().unsqueeze(-1) / (1.0 if shared is None else shared)
    zp = None if args.symmetric else zero_point.float().unsqueeze(-1)
    difference = (reconstruct(flat.float(), effective, zp, args) - flat.float()).double()
    return (difference.abs().pow(norm) * weighing).sum((0, -1))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("scheme", EXACT)
def test_optimal(scheme: str, weighted: bool) -> None:
    dtype, norm = EXACT[scheme]
    args = weight_args(scheme, 16 if scheme.startswith("W4") else None)
    x = weight(dtype, 6, 32)
    if not args.symmetric:
        x = x[4:, :16]  # minutes of small steps otherwise, for the reference too
    flat = flatten_for_calibration(x, "weight", args)
    scale_dtype, shared = scale_dtype_of(args, dtype), shared_scale(x, args)
    importance = None
    if weighted:
        importance = torch.rand(flat.shape, generator=torch.Generator().manual_seed(6))
        importance[..., ::5] = 0
    both = [
        optimal_qparams(flat, args, scale_dtype, importance, shared, backend=b, norm=norm)
        for b in ("triton", "reference")
    ]
    weighing = 1.0 if importance is None else importance.double()
    ours, best = (raised_error(flat, *q, args, shared, norm, weighing) for q in both)
    assert bool((ours <= best * (1 + 1e-4) + 1e-30).all()), ours / best
    assert [t.dtype for t in both[0]] == [t.dtype for t in both[1]]
    ranged = qparams_from_range(*range_of(flat), args, scale_dtype, shared)
    ranged_error = float(raised_error(flat, *ranged, args, shared, norm, weighing).sum())
    # powers of two are too far apart for a better one
    assert float(ours.sum()) < ranged_error or args.scale_dtype == torch.uint8


def test_the_first_of_equal_scales_stays() -> None:
    """Small integers that reach equally far to both sides: s and -s are exactly as good."""
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=6)
    x = torch.randint(-40, 41, (24, 6), generator=torch.Generator().manual_seed(1))
    x[:, 1] = -x[:, 0]
    flat = x.to(torch.bfloat16).reshape(1, 24, 1, 6)
    found, reference = (
        optimal_qparams(flat, args, torch.bfloat16, negative_scales=True, backend=b)[0]
        for b in ("triton", "reference")
    )
    assert_close(found, reference, rtol=0, atol=0)
    assert bool((found < 0).any()) and bool((found > 0).any())


def test_optimal_of_long_groups() -> None:
    """Four warps and several tiles."""
    args = QuantizationArgs(num_bits=8, type="float", strategy="channel")
    x = torch.randn(2, 2100, generator=torch.Generator().manual_seed(8)).half()
    flat = flatten_for_calibration(x, "weight", args)
    both = [
        optimal_qparams(flat, args, torch.bfloat16, backend=b)[0] for b in ("triton", "reference")
    ]
    assert_close(*both, rtol=0, atol=0)
