"""Scale and zero point of a range, against NumPy."""

from __future__ import annotations

import numpy as np
import numpy_oracle as oracle
import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.kernels.qparams import global_scale_of, is_mx, qparams_from_range, scale_dtype_of

FLOAT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
FP32_MAX = torch.finfo(torch.float32).max
NVFP4 = preset_name_to_scheme("NVFP4", ["Linear"]).weights
MX = {name: preset_name_to_scheme(name, ["Linear"]).weights for name in ("MXFP4", "MXFP8")}


def int_args(bits: int, symmetric: bool) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, symmetric=symmetric, strategy="channel")


def fp_args(bits: int, symmetric: bool = True) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type="float", symmetric=symmetric, strategy="channel")


ARGS = {
    **{f"int{bits}": int_args(bits, True) for bits in range(2, 9)},
    **{f"int{bits}_asym": int_args(bits, False) for bits in range(2, 9)},
    "fp8": fp_args(8),
    "fp8_asym": fp_args(8, symmetric=False),
    "fp4": fp_args(4),
}

every_type = pytest.mark.parametrize("args", ARGS.values(), ids=ARGS)
every_dtype = pytest.mark.parametrize("dtype", FLOAT_DTYPES, ids=str)


def check(
    low: object,
    high: object,
    args: QuantizationArgs,
    dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Compare with the oracle bit for bit; return scale and zero point."""
    low = torch.as_tensor(low, dtype=torch.float32)
    high = torch.as_tensor(high, dtype=torch.float32)
    kept = low.clone(), high.clone()
    scale, zero_point = qparams_from_range(low, high, args, dtype, global_scale, "reference")
    compiled = qparams_from_range(low, high, args, dtype, global_scale, "auto")
    torch.testing.assert_close(compiled, (scale, zero_point), rtol=0, atol=0)
    torch.testing.assert_close((low, high), kept, rtol=0, atol=0, msg="the range was modified")

    one_byte = dtype in (torch.uint8, torch.float8_e4m3fn)
    assert scale.dtype == (torch.float32 if one_byte else dtype)
    assert zero_point.dtype == args.zp_dtype
    assert scale.shape == zero_point.shape == low.shape
    assert bool((torch.isfinite(scale) & (scale > 0)).all()), scale
    expected_scale, expected_zero_point = oracle.qparams(
        low.numpy(),
        high.numpy(),
        args,
        dtype,
        None if global_scale is None else global_scale.item(),
    )
    np.testing.assert_array_equal(scale.double().numpy(), expected_scale)
    np.testing.assert_array_equal(zero_point.double().numpy(), expected_zero_point)
    return expected_scale, expected_zero_point


def random_ranges(seed: int, count: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    """Ranges of all kinds: across zero, on one side of it, and of many magnitudes."""
    generator = torch.Generator().manual_seed(seed)
    ends = torch.randn(2, count, generator=generator)
    ends *= 10 ** (torch.rand(count, generator=generator) * 7 - 3.5)
    return ends.amin(0), ends.amax(0)


@every_dtype
@every_type
def test_random_ranges(args: QuantizationArgs, dtype: torch.dtype) -> None:
    for seed in range(3):
        low, high = random_ranges(seed)
        if dtype == torch.float16:  # values of fp16 tensors
            low, high = low.half().float(), high.half().float()
        check(low, high, args, dtype)
        check(low.reshape(4, 16), high.reshape(4, 16), args, dtype)


@every_dtype
@every_type
def test_zero_stays_representable(args: QuantizationArgs, dtype: torch.dtype) -> None:
    """A range on one side of zero is stretched to it."""
    for low, high in (([2.0], [3.0]), ([-3.0], [-2.0])):
        scale, zero_point = check(low, high, args, dtype)
        zero = oracle.reconstruct(0.0, scale, zero_point, args)
        np.testing.assert_array_equal(zero, [0])
        far = high if low[0] > 0 else low
        step = scale if args.type == "int" else scale * 32  # e4m3's widest step, e2m1's is 2
        kept = oracle.reconstruct(far, scale, zero_point, args)
        assert (np.abs(kept - far) <= step).all(), f"{far} became {kept}"


@every_dtype
@every_type
def test_range_that_is_zero(args: QuantizationArgs, dtype: torch.dtype) -> None:
    scale, _ = check([0.0, -0.0], [0.0, 0.0], args, dtype)
    np.testing.assert_array_equal(scale, [torch.finfo(dtype).eps] * 2)


@every_dtype
@every_type
def test_largest_finite_ranges(args: QuantizationArgs, dtype: torch.dtype) -> None:
    top = torch.finfo(dtype).max
    low, high = [-top, 0.0, -top, -top / 2, -1.0], [top, top, 0.0, top, top]
    scale, zero_point = check(low, high, args, dtype)
    if args.type == "int" and not args.symmetric:
        qmin, qmax = oracle.limits(args)
        # max - min does not fit in the type, but the scale is its share of it
        expected = (np.array(high) - np.array(low)) / (qmax - qmin)
        np.testing.assert_allclose(scale, expected, rtol=torch.finfo(dtype).eps)
        assert zero_point[1] == qmin
        assert zero_point[2] == qmax


@every_type
def test_range_wider_than_its_scale_type(args: QuantizationArgs) -> None:
    """An average over fp32 and fp16 values, say: the largest fp16 stands in."""
    scale, _ = check([-1e8, -1e38], [1e8, 1e38], args, torch.float16)
    np.testing.assert_array_equal(scale, [65504] * 2)


@pytest.mark.parametrize("share", [0.2, 0.2499999, 0.25, 0.2500001, 0.3, 0.5, 1.0])
@every_type
def test_near_the_largest_nothing_jumps(args: QuantizationArgs, share: float) -> None:
    """Around the magnitude from which on halves are used."""
    check(
        [-FP32_MAX * share, -1.0], [FP32_MAX * share * 0.9, FP32_MAX * share], args, torch.float32
    )


@every_dtype
@every_type
def test_smallest_ranges(args: QuantizationArgs, dtype: torch.dtype) -> None:
    info = torch.finfo(dtype)
    least = info.smallest_normal * info.eps
    high = torch.tensor([1, 2, 3, 10, 1000], dtype=torch.float64) * least
    if dtype == torch.float32:  # a scale that vanishes in fp32 itself has a test of its own
        high = high * 1024
    check(-high.float(), high.float(), args, dtype)
    check(torch.zeros(5), high.float(), args, dtype)


@every_type
def test_scale_that_vanishes_in_float32(args: QuantizationArgs) -> None:
    """Ranges of a few denormals: whatever positive scale stands in does no more harm than zero."""
    high = torch.tensor([1, 2, 3, 5, 40, 300], dtype=torch.float64) * 2.0**-149
    for low in (-high, 0 * high):
        scale, zero_point = qparams_from_range(low.float(), high.float(), args, torch.float32)
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), scale
        kept = oracle.reconstruct(high, scale, zero_point.double(), args)
        assert (np.abs(kept - high.numpy()) <= high.numpy()).all(), f"{high} became {kept}"


@every_dtype
def test_scale_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    """Halfway between two stored values the even one is taken: 7.5 * scale is exact here."""
    step = torch.finfo(dtype).eps
    scales = torch.tensor([1 + step * k / 4 for k in range(17)], dtype=torch.float64)
    high = (scales * 7.5).float()
    if dtype != torch.float32:
        torch.testing.assert_close(high.double(), scales * 7.5, rtol=0, atol=0)
        stored, _ = check(torch.zeros(17), high, int_args(4, True), dtype)
        assert stored[2] == 1.0, "a tie went up to the odd neighbour"
        assert stored[6] == 1 + 2 * step, "a tie went down to the odd neighbour"
    else:
        check(torch.zeros(17), high, int_args(4, True), dtype)


def test_zero_point_belongs_to_the_stored_scale() -> None:
    """Rounding to bf16 moves this scale so far that the zero point of the exact one is off."""
    args = int_args(8, False)
    low, high = np.float32(-127), np.float32(1)
    scale, zero_point = check([low], [high], args, torch.bfloat16)
    exact = (high - low) / np.float32(255)
    of_exact = np.rint(np.float32(-128) - low / exact)
    assert scale[0] != exact
    assert zero_point[0] != of_exact, "the case does not tell the two apart"
    assert zero_point[0] == np.rint(np.float32(-128) - low / np.float32(scale[0]))


# -- NVFP4 ----------------------------------------------------------------------------------


def test_global_scale_maps_the_largest_group_to_the_largest_code() -> None:
    for absmax in (1.0, 1e-3, 448 * 6.0, 1e30, 3e38, 1e-30):
        global_scale = global_scale_of(torch.tensor(absmax))
        assert global_scale.dtype == torch.float32
        assert tuple(global_scale.shape) == (1,)
        np.testing.assert_allclose(global_scale.double().numpy(), [2688 / absmax], rtol=1e-6)
        scale, _ = check([-absmax], [0.0], NVFP4, torch.float8_e4m3fn, global_scale)
        assert scale.tolist() == [448]


@pytest.mark.parametrize("absmax", [0.0, 1e-45, 1e-38, 1e-36, FP32_MAX])
def test_global_scale_is_finite_and_positive(absmax: float) -> None:
    global_scale = global_scale_of(torch.tensor(absmax))
    assert 0 < global_scale.item() < float("inf")
    scale, _ = check([-absmax, 0.0], [absmax, absmax], NVFP4, torch.float8_e4m3fn, global_scale)
    assert bool(np.isfinite(scale / global_scale.item()).all())


@pytest.mark.parametrize("absmax", [1e-60, 1e-300, 1e60, 1e300])
def test_global_scale_of_float64(absmax: float) -> None:
    """The quotient fits fp64 but not the fp32 in which it is stored."""
    global_scale = global_scale_of(torch.tensor(absmax, dtype=torch.float64))
    assert global_scale.dtype == torch.float32
    assert 0 < global_scale.item() < float("inf")


def test_nvfp4_scales_span_all_codes() -> None:
    """Group magnitudes across all of E4M3, ties included, and far below its smallest code."""
    global_scale = global_scale_of(torch.tensor(2688.0))
    assert global_scale.item() == 1
    codes = np.concatenate([oracle.E4M3[1:], (oracle.E4M3[1:-1] + oracle.E4M3[2:]) / 2])
    high = torch.tensor(codes * 6, dtype=torch.float32)
    check(-high, high, NVFP4, torch.float8_e4m3fn, global_scale)


def test_nvfp4_code_never_becomes_zero() -> None:
    global_scale = global_scale_of(torch.tensor(2688.0))
    # the least code is 2^-9; half of it and everything below would round to zero
    high = torch.tensor([6 * 2.0**-10, 6 * 2.0**-11, 1e-6, 1e-20, 1e-38, 1e-44])
    scale, _ = check(-high, high, NVFP4, torch.float8_e4m3fn, global_scale)
    np.testing.assert_array_equal(scale, [2.0**-9] * 6)


def test_nvfp4_code_never_overflows() -> None:
    """A group above what the global scale was made for."""
    scale, _ = check(
        [-1e4], [1e5], NVFP4, torch.float8_e4m3fn, global_scale_of(torch.tensor(2688.0))
    )
    np.testing.assert_array_equal(scale, [448])


def test_nvfp4_group_of_zeros() -> None:
    scale, _ = check([0.0], [0.0], NVFP4, torch.float8_e4m3fn, global_scale_of(torch.tensor(1.0)))
    np.testing.assert_array_equal(scale, [0.125])


# -- MX -------------------------------------------------------------------------------------

every_mx = pytest.mark.parametrize("args", MX.values(), ids=MX)


@every_mx
def test_mx_scales_of_every_exponent(args: QuantizationArgs) -> None:
    """From denormals to the largest finite value, at each side of the rounding point 1.75."""
    significands = np.array([1, 1.25, 1.5, 1.7499999, 1.75, 1.7500001, 1.9999999])
    high = (significands[:, None] * 2.0 ** np.arange(-126, 128)).astype(np.float32)
    scale, _ = check(torch.zeros(high.shape), high, args, torch.uint8)
    assert scale.min() == 2.0**-127
    assert scale.max() == 2.0 ** (128 - {4: 2, 8: 8}[args.num_bits])
    low, _ = check(-high, torch.zeros(high.shape), args, torch.uint8)
    np.testing.assert_array_equal(low, scale)


@every_mx
def test_mx_scale_at_the_ends_of_e8m0(args: QuantizationArgs) -> None:
    scale, _ = check([0.0, 0.0, 0.0], [0.0, 1e-45, 1e-39], args, torch.uint8)
    np.testing.assert_array_equal(scale, [2.0**-127] * 3)  # code 0
    wide = torch.tensor([1e300], dtype=torch.float64)
    scale, _ = qparams_from_range(-wide, wide, args, torch.uint8)
    np.testing.assert_array_equal(scale.numpy(), [2.0**127])  # code 254, 255 means NaN


# -- types ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["int4", "int4_asym", "int8_asym", "fp8"])
def test_float64_is_computed_in_float64(name: str) -> None:
    args = ARGS[name]
    low, high = (v.double() + 1e-12 for v in random_ranges(5))
    scale, zero_point = qparams_from_range(low, high, args, torch.float64)
    assert scale.dtype == torch.float64
    low, high = np.minimum(low.numpy(), 0), np.maximum(high.numpy(), 0)
    qmin, qmax = oracle.limits(args)
    width = 2 * np.maximum(-low, high) if args.symmetric else high - low
    np.testing.assert_allclose(scale.numpy(), width / (qmax - qmin), rtol=1e-15)
    expected = 0 * low if args.symmetric else oracle.round_to_type(qmin - low / scale.numpy(), args)
    np.testing.assert_array_equal(zero_point.double().numpy(), expected)


@every_type
def test_float64_at_its_ends(args: QuantizationArgs) -> None:
    top = torch.tensor([torch.finfo(torch.float64).max], dtype=torch.float64)
    for low, high in ((-top, top), (-top, 0 * top), (0 * top, top), (0 * top, top * 1e-308**2)):
        scale, zero_point = qparams_from_range(low, high, args, torch.float64)
        assert bool((torch.isfinite(scale) & (scale > 0)).all()), scale
        assert bool(torch.isfinite(zero_point.double()).all()), zero_point


def test_which_scales_are_powers_of_two() -> None:
    assert all(is_mx(args) for args in MX.values())
    assert not is_mx(NVFP4)
    assert not any(is_mx(args) for args in ARGS.values())


@every_dtype
def test_scale_dtype(dtype: torch.dtype) -> None:
    assert scale_dtype_of(NVFP4, dtype) == torch.float8_e4m3fn
    assert scale_dtype_of(MX["MXFP4"], dtype) == torch.uint8
    assert scale_dtype_of(ARGS["int4"], dtype) == dtype
