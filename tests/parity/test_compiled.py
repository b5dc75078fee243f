"""Compiled kernels against the reference, at each instruction set.

A search may choose otherwise only where two candidates are as good as equal: at most one choice in
ten thousand, and never one whose error is more than 1e-4 above the reference's.
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
from steelyard.kernels.squares import sum_of_squares
from steelyard.observers.helpers import flatten_for_calibration, view_blocks

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = ["W4A16", "W4A16_ASYM", "W8A8", "int3", "FP8_DYNAMIC", "FP8", "NVFP4A16", "MXFP4A16"]


def weight_args(scheme: str, group_size: int | None = None) -> QuantizationArgs:
    if scheme == "int3":  # a preset only in newer versions
        return QuantizationArgs(num_bits=3, strategy="group", group_size=group_size or 128)
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    return args if group_size is None else args.model_copy(update={"group_size": group_size})


def weight(dtype: torch.dtype, rows: int = 96, columns: int = 384, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=generator)
    x *= torch.logspace(-6, 2, rows).unsqueeze(1)  # rows of all magnitudes
    x[3] = 0
    x[5, 7:] = 0
    return x.to(dtype)


def shared_scale(x: torch.Tensor, args: QuantizationArgs) -> torch.Tensor | None:
    return global_scale_of(x.abs().max().float()) if args.strategy == "tensor_group" else None


# -- range ----------------------------------------------------------------------------------

SHAPES = [
    (1, 7, 13),
    (1, 64, 16),
    (1, 33, 32),
    (1, 5, 3, 128),
    (1, 1, 100_003),
    (300, 1, 70),
    (40, 6, 32),
    (9, 4, 1, 1, 24),
    (1, 2, 5, 1, 48),
    (1, 3, 1),
    (1, 37, 2),
    (1, 515, 4),
    (1, 129, 64),
    (1, 9, 11, 16),
    (1, 3, 67, 96),
    (1, 1, 2, 1024),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_range(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)
    x.view(-1)[0] = -0.0
    layouts = [x, x.transpose(0, -1).contiguous().transpose(0, -1), x[..., :1].expand(shape)]
    for observed in layouts:
        got, expected = (range_of(observed, 1, b) for b in ("compiled", "reference"))
        assert_close(got, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("n", [1, 16, 100, 1 << 19])
def test_range_shows_what_is_not_finite(isa: str, n: int, value: float, dtype: torch.dtype) -> None:
    x = torch.zeros(1, 1, n, dtype=dtype)
    x[0, 0, n // 2] = value
    low, high = range_of(x, 1, "compiled")
    assert not bool(torch.isfinite(low) & torch.isfinite(high))


@pytest.mark.parametrize("dtype", DTYPES)
def test_range_at_the_ends_of_the_type(isa: str, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    x = torch.tensor([[[info.min, info.max], [least, -least], [info.tiny, 0.0]]], dtype=dtype)
    assert_close(range_of(x, 1, "compiled"), range_of(x, 1, "reference"), rtol=0, atol=0)


def test_blocks_are_read_in_place(isa: str) -> None:
    args = weight_args("FP8_BLOCK").model_copy(update={"block_structure": [16, 24]})
    x = weight(torch.bfloat16, 64, 96)
    view = view_blocks(x, args)
    assert view.data_ptr() == x.data_ptr()
    got = range_of(view, 2, "compiled")
    assert_close(got, range_of(flatten_for_calibration(x, "weight", args), 1, "reference"))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [(3, 32), (128, 128), (5, 16), (7, 2)], ids=str)
def test_range_of_blocks(isa: str, block: tuple[int, int], dtype: torch.dtype) -> None:
    rows, columns = block
    x = torch.randn(2 * rows, 5 * columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    blocks = x.view(2, rows, 5, columns).transpose(1, 2).unsqueeze(0)
    got, expected = (range_of(blocks, 2, b) for b in ("compiled", "reference"))
    assert_close(got, expected, rtol=0, atol=0)


# -- scales ---------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 15, 16, 700])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_qparams(isa: str, scheme: str, dtype: torch.dtype, count: int) -> None:
    """Bit for bit; with ranges that are zero, on one side of it, tiny and huge among the others."""
    args = weight_args(scheme)
    generator = torch.Generator().manual_seed(count)
    ends = torch.randn(2, count, generator=generator)
    ends *= 10 ** (torch.rand(count, generator=generator) * 8 - 5)
    ends = ends.to(dtype).float()
    ends[:, ::7] = 0
    if count > 600:
        info = torch.finfo(dtype)
        ends[:, 5] = torch.tensor([info.min, info.max])
        ends[:, 530] = info.smallest_normal * info.eps  # in the second tile
    stored = scale_dtype_of(args, dtype)
    shared = torch.tensor([37.5]) if args.strategy == "tensor_group" else None
    low, high = ends.amin(0), ends.amax(0)
    got, expected = (
        qparams_from_range(low, high, args, stored, shared, b) for b in ("compiled", "reference")
    )
    assert_close(got, expected, rtol=0, atol=0)


# -- search ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", [*SCHEMES, "MXFP8A16", "FP8_BLOCK"])
def test_search(isa: str, scheme: str, dtype: torch.dtype) -> None:
    args = weight_args(scheme)
    x = weight(dtype)
    flat = flatten_for_calibration(x, "weight", args)
    scale_dtype, shared = scale_dtype_of(args, dtype), shared_scale(x, args)
    factors = shrink_factors(0.5, 20)
    column_weights = torch.rand(x.shape[1], generator=torch.Generator().manual_seed(2))
    weights = flatten_for_calibration(column_weights.expand(len(x), -1), "weight", args)
    total = different = 0
    for norm in (1.0, 2.0, 2.4, 3.0):
        for importance in (None, weights):
            found = [
                search_range(
                    flat, args, scale_dtype, factors, norm, 0, importance, shared, backend=b
                )
                for b in ("compiled", "reference")
            ]
            low, high = range_of(flat)
            errors = candidate_errors(
                flat, low, high, args, scale_dtype, factors, norm, importance, shared
            )
            table = torch.tensor(factors).reshape(-1, *[1] * low.ndim)
            picked = [
                ((low * table == lo) & (high * table == hi)).int().argmax(0) for lo, hi in found
            ]
            ours, best = (errors.gather(0, p.unsqueeze(0)).squeeze(0) for p in picked)
            assert bool((ours <= best * (1 + 1e-4) + 1e-30).all()), f"norm {norm}"
            total += low.numel()
            different += int((picked[0] != picked[1]).sum())
    assert different <= max(1, total // 10_000), f"{different} of {total} choices differ"


@pytest.mark.parametrize("columns", [1, 2, 7, 15, 16, 17, 33, 100, 511, 513, 5000, 40_000])
def test_search_of_any_group_size(isa: str, columns: int) -> None:
    args = QuantizationArgs(num_bits=4, strategy="channel")
    x = torch.randn(3, columns, generator=torch.Generator().manual_seed(3))
    flat = flatten_for_calibration(x, "weight", args)
    both = [
        search_range(flat, args, torch.float32, shrink_factors(0.3, 20), 2.4, backend=b)
        for b in ("compiled", "reference")
    ]
    assert_close(*both, rtol=0, atol=0)


@pytest.mark.parametrize("repeats", [1, 1000], ids=["short", "in_tiles"])
@pytest.mark.parametrize("rows", [1, 3])
def test_patience_stops_where_the_reference_stops(isa: str, rows: int, repeats: int) -> None:
    args = QuantizationArgs(num_bits=3, strategy="channel")
    generator = torch.Generator().manual_seed(4)
    stopped = 0
    for _ in range(12):
        x = torch.randn(rows, 24, generator=generator).repeat(1, repeats)
        flat = flatten_for_calibration(x, "weight", args)
        for patience in (0, 1, 2, 5):
            both = [
                search_range(
                    flat, args, torch.float32, shrink_factors(0.6, 50), 2.0, patience, backend=b
                )
                for b in ("compiled", "reference")
            ]
            assert_close(*both, rtol=0, atol=0)
            if patience == 0:
                full = both[0]
            stopped += int(not torch.equal(both[0][1], full[1]))
    assert stopped, "patience never changed an answer, so nothing was tested"


def test_search_reads_strided_weights_in_place(isa: str) -> None:
    args = weight_args("W4A16", 32)
    x = weight(torch.bfloat16, 64, 128)
    flat = flatten_for_calibration(x, "weight", args)
    strided = flatten_for_calibration(x.t().contiguous().t(), "weight", args)
    assert strided.stride(-1) != 1
    results = [
        search_range(f, args, torch.bfloat16, shrink_factors(0.2, 50), 2.0, backend="compiled")
        for f in (flat, strided)
    ]
    assert_close(*results, rtol=0, atol=0)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("strategy", ["tensor", "channel"])
def test_threads_change_nothing(isa: str, strategy: str, threads: int) -> None:
    args = QuantizationArgs(num_bits=4, strategy=strategy)
    x = weight(torch.bfloat16, 96, 3000)
    flat = flatten_for_calibration(x, "weight", args)
    before = torch.get_num_threads()
    found = []
    try:
        for count in (1, threads):
            torch.set_num_threads(count)
            found.append(
                (
                    range_of(flat, 1, "compiled"),
                    search_range(
                        flat, args, torch.bfloat16, shrink_factors(0.4, 20), 2.4, backend="compiled"
                    ),
                    optimal_qparams(flat, args, torch.bfloat16, backend="compiled"),
                    sum_of_squares(x, "compiled"),
                )
            )
    finally:
        torch.set_num_threads(before)
    assert_close(*found, rtol=0, atol=0)


# -- exact search ---------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [2.0, 2.4, 3.0, 4.0])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_optimal(
    builds: list[str],
    scheme: str,
    dtype: torch.dtype,
    norm: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All instruction sets in one test: the reference takes most of its time."""
    grouped = scheme in ("W4A16", "W4A16_ASYM", "int3")
    args = weight_args(scheme, 32 if grouped else None)
    if not args.symmetric and dtype == torch.float16:
        pytest.skip("minutes of small steps for the reference; tried against brute force instead")
    x = weight(dtype, 12, 96)
    flat = flatten_for_calibration(x, "weight", args)
    scale_dtype, shared = scale_dtype_of(args, dtype), shared_scale(x, args)

    def found(backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        return optimal_qparams(flat, args, scale_dtype, None, shared, backend=backend, norm=norm)

    expected = found("reference")
    best = raised_error(flat, *expected, args, shared, norm)
    for isa in builds:
        monkeypatch.setenv("STEELYARD_ISA", isa)
        scale, zero_point = found("compiled")
        ours = raised_error(flat, scale, zero_point, args, shared, norm)
        assert bool((ours <= best * (1 + 1e-4) + 1e-30).all()), (isa, ours / best)
        assert (scale.dtype, zero_point.dtype) == tuple(each.dtype for each in expected)


def raised_error(
    flat: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    shared: torch.Tensor | None,
    norm: float = 2.0,
    weighing: torch.Tensor | float = 1.0,
) -> torch.Tensor:
    effective = scale.float().unsqueeze(-1) / (1.0 if shared is None else shared)
    zp = None if args.symmetric else zero_point.float().unsqueeze(-1)
    x = flat.float()
    difference = (reconstruct(x, effective, zp, args) - x).double() * weighing
    return difference.abs().pow(norm).sum((0, -1))


def test_optimal_is_never_above_the_grid(isa: str) -> None:
    args = weight_args("W4A16", 64)
    flat = flatten_for_calibration(weight(torch.bfloat16), "weight", args)
    best = raised_error(
        flat, *optimal_qparams(flat, args, torch.bfloat16, backend="compiled"), args, None
    )
    chosen = search_range(flat, args, torch.bfloat16, shrink_factors(0.8, 100), 2.0)
    grid = raised_error(flat, *qparams_from_range(*chosen, args, torch.bfloat16), args, None)
    assert bool((best <= grid * (1 + 1e-6)).all())
    assert float(best.sum()) < float(grid.sum())


# -- sums of squares ------------------------------------------------------------------------


@pytest.mark.parametrize("norm", [2.4, 3.0])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "FP8", "NVFP4A16"])
def test_optimal_under_a_norm_with_weights(isa: str, scheme: str, norm: float) -> None:
    """A tensor of many values is read in tiles, and weighs as one that is not."""
    args = weight_args(scheme, 64 if scheme.startswith("W4A16") else None)
    x = weight(torch.bfloat16, 24, 768, seed=4)
    flat, shared = flatten_for_calibration(x, "weight", args), shared_scale(x, args)
    importance = torch.rand(flat.shape, generator=torch.Generator().manual_seed(6))
    scale_dtype = scale_dtype_of(args, torch.bfloat16)
    both = [
        optimal_qparams(flat, args, scale_dtype, importance, shared, backend=b, norm=norm)
        for b in ("compiled", "reference")
    ]
    weighing = importance ** (1 / norm)  # inside the power
    ours, best = (raised_error(flat, s, z, args, shared, norm, weighing) for s, z in both)
    assert bool((ours <= best * (1 + 1e-4) + 1e-30).all()), ours / best


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (3, 700, 130), (5000, 3), (2, 2, 2, 1025)], ids=str)
def test_sum_of_squares(isa: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(5)).to(dtype)
    exact = x.double().square().flatten(0, -2).sum(0)
    assert_close(sum_of_squares(x, "compiled").double(), exact, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_sum_of_squares_hides_nothing(isa: str, value: float, dtype: torch.dtype) -> None:
    x = torch.ones(4, 40, dtype=dtype)
    x[2, 3] = value
    sums = sum_of_squares(x, "compiled")
    assert not bool(torch.isfinite(sums[3]))
    assert bool(torch.isfinite(sums[4]))
