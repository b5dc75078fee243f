"""The exact search against brute force: every code that can be stored, every zero point."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.kernels.optimal_search import optimal_qparams, scale_codes
from steelyard.kernels.qparams import global_scale_of, qparams_from_range

GROUP = 8
FP8_GRID = torch.arange(0, 127, dtype=torch.uint8).view(torch.float8_e4m3fn).double().numpy()
FP4_GRID = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
SCHEMES = [
    "int2",
    "int3",
    "W4A16",
    "W4A16_ASYM",
    "W8A16",
    "FP8_DYNAMIC",
    "NVFP4A16",
    "MXFP4A16",
    "MXFP8A16",
]


def nearest(y: np.ndarray, args: QuantizationArgs) -> np.ndarray:
    """Round to the quantized type by looking at all its values."""
    if args.type == "int":
        return np.rint(np.clip(y, -(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1) - 1))
    grid = FP4_GRID if args.num_bits == 4 else FP8_GRID
    middles = (grid[1:] + grid[:-1]) / 2
    return np.sign(y) * grid[np.searchsorted(middles, np.abs(y))]


def least_error(
    x: np.ndarray, w: np.ndarray, args: QuantizationArgs, scales: np.ndarray, norm: float = 2.0
) -> float:
    zero_points = [0]
    if not args.symmetric:
        zero_points = list(range(-(2 ** (args.num_bits - 1)), 2 ** (args.num_bits - 1)))
    return min(errors(x, w, args, scales, z, norm).min() for z in zero_points)


def errors(
    x: np.ndarray,
    w: np.ndarray,
    args: QuantizationArgs,
    scales: np.ndarray,
    zero_point: float,
    norm: float = 2.0,
) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        y = x[None] / scales[:, None] + zero_point
        d = (nearest(y, args) - zero_point) * scales[:, None] - x[None]
        return (w[None] * np.abs(d) ** norm).sum(1)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("weighed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_code_is_better(scheme: str, dtype: torch.dtype, weighed: bool, backend: str) -> None:
    assert_no_code_is_better(scheme, dtype, weighed, backend, 2.0)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("norm", [1.0, 1.5, 2.4, 3.0, 4.0, 8.0])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_no_code_is_better_for_another_norm(scheme: str, norm: float, backend: str) -> None:
    if backend == "reference" and scheme == "W4A16_ASYM" and norm not in (2.4, 3.0):
        pytest.skip("seconds of small steps each; the compiled search is tried on every norm")
    weighed = norm in (1.5, 3.0, 4.0)
    assert_no_code_is_better(scheme, torch.bfloat16, weighed, backend, norm)


def assert_no_code_is_better(
    scheme: str, dtype: torch.dtype, weighed: bool, backend: str, norm: float
) -> None:
    if scheme.startswith("int"):
        args = QuantizationArgs(num_bits=int(scheme[3:]), strategy="group", group_size=GROUP)
    else:
        args = preset_name_to_scheme(scheme, ["Linear"]).weights
    if backend == "reference" and not args.symmetric and dtype == torch.float16:
        pytest.skip("a minute of small steps; the compiled search is tried on fp16 as well")
    if args.scale_dtype is None and args.strategy == "group":
        args = args.model_copy(update={"group_size": GROUP})
    size = args.group_size or GROUP
    generator = torch.Generator().manual_seed(len(scheme))
    x = torch.randn(1, 3, 1, size, generator=generator)
    x = (x * torch.tensor([1e-3, 1.0, 40.0]).reshape(1, 3, 1, 1)).to(dtype)
    w = torch.rand(1, 3, 1, size, generator=generator)
    w = torch.where(w < 0.3, 0, w) if weighed else torch.ones_like(w)
    shared = None
    if args.strategy == "tensor_group":
        shared = global_scale_of(x.abs().max().float())
    stored = args.scale_dtype or dtype
    scale, zero_point = optimal_qparams(
        x, args, stored, w if weighed else None, shared, backend=backend, norm=norm
    )
    codes = scale_codes(stored).numpy()
    assert bool(np.isin(scale.double().numpy(), codes).all()), "not a scale that can be stored"
    divisor = 1.0 if shared is None else float(shared)
    for g in range(3):
        values, weights = (t[0, g, 0].double().numpy() for t in (x, w))
        got = errors(
            values,
            weights,
            args,
            np.array([float(scale[g, 0]) / divisor]),
            float(zero_point[g, 0].float()),
            norm,
        )[0]
        best = least_error(values, weights, args, codes / divisor, norm)
        # of each error, fp32 keeps some 1e-5, of which a power makes as many
        close = 1e-5 if norm == 2 else 1e-5 * norm
        assert got <= best * (1 + close) + 1e-30, f"group {g}: {got} but {best} is possible"


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("norm", [1.0, 2.4, 4.0, 8.0])
@pytest.mark.parametrize("magnitude", [1e-30, 1e-12, 1e12, 1e30])
def test_powers_neither_overflow_nor_vanish(magnitude: float, norm: float, backend: str) -> None:
    """A power of two changes no code, so it only multiplies the scale."""
    args = QuantizationArgs(num_bits=4, strategy="channel", symmetric=True)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(1, 20, 1, 32, generator=generator).to(torch.bfloat16)
    factor = 2.0 ** round(np.log2(magnitude))
    near, _ = optimal_qparams(x, args, torch.bfloat16, backend=backend, norm=norm)
    far, _ = optimal_qparams(x * factor, args, torch.bfloat16, backend=backend, norm=norm)
    torch.testing.assert_close(far, near * factor, rtol=0, atol=0)


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("norm", [1.5, 2.4, 3.0])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM"])
def test_values_that_a_scale_holds_exactly_get_it(scheme: str, norm: float, backend: str) -> None:
    """The power of zero must count as zero, or the search would never end early."""
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    x = (0.25 * torch.arange(-8, 8)).reshape(1, 1, 1, 16).to(torch.bfloat16)
    scale, _ = optimal_qparams(x, args, torch.bfloat16, backend=backend, norm=norm)
    assert float(scale) == 0.25


@pytest.mark.parametrize("backend", ["compiled", "reference"])
def test_negative_scales_help_where_the_long_side_is_positive(backend: str) -> None:
    """Codes -8..7: a group that reaches further above zero wants the spare code there."""
    args = QuantizationArgs(num_bits=4, strategy="channel")
    x = torch.tensor([8.0, 7.0, 3.0, -5.0, 1.0, 2.0]).to(torch.bfloat16).reshape(1, 1, 1, 6)
    plain, _ = optimal_qparams(x, args, torch.bfloat16, backend=backend)
    mirrored, _ = optimal_qparams(x, args, torch.bfloat16, negative_scales=True, backend=backend)
    assert float(plain) > 0
    assert float(mirrored) == -1.0, "scale -1 holds every value exactly"
    flipped, _ = optimal_qparams(-x, args, torch.bfloat16, negative_scales=True, backend=backend)
    assert float(flipped) == 1.0


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("scheme", ["W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16"])
def test_groups_without_a_best_scale_keep_that_of_their_range(scheme: str, backend: str) -> None:
    args = preset_name_to_scheme(scheme, ["Linear"]).weights
    zeros = torch.zeros(1, 2, 1, args.group_size, dtype=torch.bfloat16)
    shared = torch.ones(1) if args.strategy == "tensor_group" else None
    stored = args.scale_dtype or torch.bfloat16
    scale, _ = optimal_qparams(zeros, args, stored, None, shared, backend=backend)
    assert bool((scale > 0).all())
    ones = torch.ones_like(zeros)
    scale, _ = optimal_qparams(
        ones, args, stored, torch.zeros_like(ones, dtype=torch.float32), shared, backend=backend
    )
    assert bool((scale > 0).all()), "weights of zero"


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("norm", [1.0, 1.5, 2.0, 2.4, 4.0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("size", [2, 5, 16])
def test_fp32_scales_are_never_worse_than_the_range(
    size: int, symmetric: bool, norm: float, backend: str
) -> None:
    """Not all fp32 scales are tried, but the one of the range is."""
    if backend == "reference" and not symmetric and (norm, size) not in ((2.0, size), (2.4, 5)):
        pytest.skip("seconds of small steps each; the compiled search is tried on every norm")
    args = QuantizationArgs(num_bits=8, strategy="channel", symmetric=symmetric)
    x = torch.randn(1, 40, 1, size, generator=torch.Generator().manual_seed(size))
    low, high = x.amin((0, 3)), x.amax((0, 3))
    plain = qparams_from_range(low, high, args, torch.float32)
    found = optimal_qparams(x, args, torch.float32, backend=backend, norm=norm)
    ones = np.ones(size)
    for g in range(40):
        values = x[0, g, 0].double().numpy()
        before, after = (
            errors(values, ones, args, np.array([float(scale[g])]), float(zero_point[g]), norm)[0]
            for scale, zero_point in (plain, found)
        )
        assert after <= before * (1 + 1e-5) + 1e-15, f"group {g}"


@pytest.mark.parametrize("backend", ["compiled", "reference"])
@pytest.mark.parametrize("norm", [1.5, 2.4, 4.0])
def test_fp32_scales_are_refined_under_any_norm(norm: float, backend: str) -> None:
    """Beyond the scales that bf16 has, which is where the search starts from."""
    args = QuantizationArgs(num_bits=4, strategy="channel", symmetric=True)
    x = torch.randn(1, 40, 1, 16, generator=torch.Generator().manual_seed(7))
    refined, _ = optimal_qparams(x, args, torch.float32, backend=backend, norm=norm)
    coarse, _ = optimal_qparams(x, args, torch.bfloat16, backend=backend, norm=norm)
    gains = []
    for g in range(40):
        before, after = (
            errors(x[0, g, 0].double().numpy(), np.ones(16), args, np.array([float(s[g])]), 0, norm)
            for s in (coarse, refined)
        )
        gains.append(1 - after[0] / before[0])
    assert min(gains) > -1e-5
    assert np.mean(np.array(gains) > 1e-6) > 0.5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_codes_are_all_of_the_type(dtype: torch.dtype) -> None:
    bits = torch.arange(1, 0x8000, dtype=torch.int16).view(dtype)
    finite = bits[torch.isfinite(bits)].double()
    torch.testing.assert_close(scale_codes(dtype), finite, rtol=0, atol=0)
    assert len(scale_codes(torch.float8_e4m3fn)) == 126
    assert len(scale_codes(torch.uint8)) == 255
