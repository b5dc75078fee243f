"""`reconstruct` against compressed-tensors' `fake_quantize`, bit for bit in fp32."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, fake_quantize

from steelyard.kernels.rounding import quantized_range, reconstruct, round_to_type

# non-negative values of each type, in order
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
E2M3 = [m / 8 for m in range(16)] + [m / 4 for m in range(8, 16)] + [m / 2 for m in range(8, 16)]
E4M3 = [m / 512 for m in range(8)]
E4M3 += [m * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8, 16)][:-1]

SCALES = [1.0, 0.5, 2.0**-20, 2.0**20, 0.1, 0.037, 3.7e-5, 1234.5, 1e-30, 1e30]


def _knows_fp6() -> bool:
    try:
        quantized_range(QuantizationArgs(num_bits=6, type="float", zp_dtype=torch.int8))
    except NotImplementedError:
        return False
    return True


@contextmanager
def uncompiled() -> Iterator[None]:
    """compressed-tensors 0.17 compiles its fp4 rounding, which takes longer than all else here."""
    with torch.compiler.set_stance("force_eager"):
        yield


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor, x: torch.Tensor) -> None:
    """Compare bit patterns; the sign of a zero has no meaning to a sum and is left out."""
    assert actual.dtype == expected.dtype == torch.float32
    actual, expected = actual + 0.0, expected + 0.0  # -0.0 + 0.0 is 0.0
    wrong = actual.view(torch.int32) != expected.view(torch.int32)
    assert not bool(wrong.any()), (
        f"{int(wrong.sum())} of {wrong.numel()} differ, such as {x[wrong][:5].tolist()}: "
        f"{actual[wrong][:5].tolist()} is not {expected[wrong][:5].tolist()}"
    )


def both_signs(magnitudes: torch.Tensor) -> torch.Tensor:
    return torch.cat([magnitudes, -magnitudes])


def around(points: torch.Tensor) -> torch.Tensor:
    """The points, and the fp32 numbers next to them on either side."""
    below = torch.nextafter(points, torch.tensor(-torch.inf))
    above = torch.nextafter(points, torch.tensor(torch.inf))
    return torch.cat([points, below, above])


def probes(values: list[float]) -> torch.Tensor:
    """Every value of a type, every halfway point, their neighbours, and what saturates."""
    codes = torch.tensor(values, dtype=torch.float32)
    halves = (codes[1:] + codes[:-1]) / 2
    top = codes[-1]
    beyond = torch.stack([top * 1.01, top + (codes[-1] - codes[-2]) / 2, top * 2, top * 1e6])
    tiny = torch.tensor([1e-3, 1e-10, 1e-38, 1e-45])
    noise = torch.rand(257, generator=torch.Generator().manual_seed(0)) * top * 1.2
    return both_signs(torch.cat([around(codes), around(halves), beyond, tiny, noise]))


def compare(
    x: torch.Tensor, scale: float, zero_point: float | None, args: QuantizationArgs
) -> None:
    scale_tensor = torch.tensor([scale])
    zp = None if zero_point is None else torch.tensor([zero_point])
    kept = x.clone()
    actual = reconstruct(x, scale_tensor, zp, args)
    torch.testing.assert_close(x, kept, rtol=0, atol=0, msg="x was modified")
    stored = None if zp is None else zp.to(args.zp_dtype)
    with uncompiled():
        expected = fake_quantize(x.clone(), scale_tensor, stored, args)
    assert_same_bits(actual, expected, x)


@pytest.mark.parametrize("bits", range(2, 9))
def test_symmetric_integers(bits: int) -> None:
    args = QuantizationArgs(num_bits=bits, strategy="tensor")
    x = probes([float(k) for k in range(2 ** (bits - 1) + 1)])
    for scale in SCALES:
        compare(x * scale, scale, None, args)
        compare(x, scale, None, args)


@pytest.mark.parametrize("bits", range(2, 9))
def test_asymmetric_integers(bits: int) -> None:
    args = QuantizationArgs(num_bits=bits, symmetric=False, strategy="tensor")
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    x = probes([float(k) for k in range(2**bits + 1)])
    for zero_point in sorted({low, low + 1, -1, 0, 1, high // 2, high - 1, high}):
        for scale in SCALES:
            compare(x * scale, scale, float(zero_point), args)


@pytest.mark.parametrize("scale", SCALES)
def test_fp8(scale: float) -> None:
    args = QuantizationArgs(num_bits=8, type="float", strategy="tensor")
    compare(probes(E4M3) * scale, scale, None, args)


@pytest.mark.parametrize("zero_point", [-448.0, -18.0, 0.0, 0.5, 26.0, 448.0])
def test_fp8_with_a_zero_point(zero_point: float) -> None:
    args = QuantizationArgs(num_bits=8, type="float", symmetric=False, strategy="tensor")
    assert args.zp_dtype == torch.float8_e4m3fn
    for scale in SCALES:
        compare(probes(E4M3) * scale, scale, zero_point, args)


@pytest.mark.parametrize("scale", SCALES)
def test_fp4(scale: float) -> None:
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor")
    compare(probes(E2M1) * scale, scale, None, args)


@pytest.mark.skipif(not _knows_fp6(), reason="this compressed-tensors has no fp6")
@pytest.mark.parametrize("scale", SCALES)
def test_fp6(scale: float) -> None:
    args = QuantizationArgs(num_bits=6, type="float", strategy="tensor")
    compare(probes(E2M3) * scale, scale, None, args)


def test_global_scale_divides_first() -> None:
    """The effective scale is the stored one over the global one, rounded once to fp32."""
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, generator=generator)
    scale = torch.tensor(E4M3[1:])[torch.randint(0, 126, (4, 4), generator=generator)]
    global_scale = torch.tensor([777.7])
    effective = (scale / global_scale).unsqueeze(-1)
    actual = reconstruct(x.reshape(4, 4, 16), effective, None, args).reshape(4, 64)
    with uncompiled():
        expected = fake_quantize(x, scale, None, args, global_scale=global_scale)
    assert_same_bits(actual, expected, x)


def test_broadcast_scales() -> None:
    args = QuantizationArgs(num_bits=4, symmetric=False, strategy="channel")
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(6, 40, generator=generator)
    scale = torch.rand(6, 1, generator=generator) + 0.01
    zero_point = torch.randint(-8, 8, (6, 1), generator=generator)
    actual = reconstruct(x, scale, zero_point.float(), args)
    assert_same_bits(actual, fake_quantize(x, scale, zero_point.to(torch.int8), args), x)


@pytest.mark.parametrize(
    ("args", "values"),
    [
        (QuantizationArgs(num_bits=8, type="float"), E4M3),
        (QuantizationArgs(num_bits=4, type="float"), E2M1),
        (QuantizationArgs(num_bits=6, type="float", zp_dtype=torch.int8), E2M3),
        (QuantizationArgs(num_bits=5), [float(k) for k in range(16)]),
    ],
    ids=["e4m3", "e2m1", "e2m3", "int5"],
)
def test_ties_go_to_the_even_code(args: QuantizationArgs, values: list[float]) -> None:
    """Independent of compressed-tensors: codes stay, halfway points take the even neighbour."""
    codes = torch.tensor(values)
    even = torch.arange(len(values) - 1)
    even = even + even % 2  # of neighbours k and k + 1
    for sign in (1, -1):
        torch.testing.assert_close(round_to_type(sign * codes, args), sign * codes, rtol=0, atol=0)
        halves = sign * (codes[1:] + codes[:-1]) / 2
        expected = sign * codes[even]
        torch.testing.assert_close(round_to_type(halves, args), expected, rtol=0, atol=0)


@pytest.mark.parametrize("bits", range(2, 9))
def test_integer_ranges(bits: int) -> None:
    assert quantized_range(QuantizationArgs(num_bits=bits)) == (
        -(2 ** (bits - 1)),
        2 ** (bits - 1) - 1,
    )


def test_float_ranges() -> None:
    assert quantized_range(QuantizationArgs(num_bits=8, type="float")) == (-448, 448)
    assert quantized_range(QuantizationArgs(num_bits=4, type="float")) == (-6, 6)
