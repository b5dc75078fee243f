"""Arithmetic of Triton's kernels: codes of values, and scales as they are stored.

Bit for bit that of kernels/rounding.py and kernels/qparams.py. Rounding adds and subtracts a number
so large that fp32 keeps no more bits than wanted; stored scales are rounded in their bits. So no
kernel needs a GPU's own fp8 or bf16 conversions, and no fused or approximate operation decides
about a code: quotients are `tl.div_rn`, and kernels are built without fused multiply-add.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl

from steelyard.kernels.compiled import SCALE_TYPES
from steelyard.kernels.rounding import minifloat, quantized_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = [
    "CodeFormat",
    "bits_of",
    "code_of",
    "from_bits",
    "held",
    "parameters_of",
    "raised",
    "round_bf16",
    "round_int",
    "store_scale",
    "widened",
]

# as in kernels.compiled.SCALE_TYPES
_FLOAT16 = tl.constexpr(1)
_BFLOAT16 = tl.constexpr(2)
_E4M3 = tl.constexpr(3)
_E8M0 = tl.constexpr(4)
_EPSILON = (1.1920929e-07, 0.0009765625, 0.0078125, 0.125, 0.0)  # of each type of scale


class CodeFormat(NamedTuple):
    """A quantized type and its scales, as a kernel is specialised for them."""

    is_int: bool
    symmetric: bool
    qmin: float
    qmax: float
    mantissa: int
    min_exponent: int
    scale: int
    epsilon: float
    has_global: bool
    mx_offset: int
    mx_round_bit: int

    @classmethod
    def of(
        cls, args: QuantizationArgs, scale_dtype: torch.dtype, has_global: bool = False
    ) -> CodeFormat:
        qmin, qmax = quantized_range(args)
        mantissa, min_exponent = (0, 0) if args.type == "int" else minifloat(args.num_bits)
        kind = SCALE_TYPES[scale_dtype]
        # compressed-tensors rounds an MX range to a power of two with fp4's mantissa, for fp8 too
        rounding_mantissa = 3 if args.num_bits == 6 else 1
        return cls(
            args.type == "int",
            bool(args.symmetric),
            qmin,
            qmax,
            mantissa,
            min_exponent,
            kind,
            _EPSILON[kind],
            has_global,
            8 if args.num_bits == 8 else 2,
            1 << (23 - rounding_mantissa - 1),
        )


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def from_bits(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widened(x):
    """Return values as fp32; bf16 by its bits: the interpreter drops its subnormal numbers."""
    if x.dtype == tl.bfloat16:
        return from_bits(x.to(tl.int16, bitcast=True).to(tl.int32) << 16)
    else:
        return x.to(tl.float32)


@triton.jit
def round_int(y):
    """Round to a whole number, ties to even; |y| below 2^22."""
    return (y + 12582912.0) - 12582912.0


@triton.jit
def _round_small(y, MANTISSA: tl.constexpr, MIN_EXPONENT: tl.constexpr):
    """Round to a float of `MANTISSA` bits, ties to even; loses the sign of zero."""
    exponent = bits_of(tl.maximum(tl.abs(y), 2.0**MIN_EXPONENT)) & 0x7F800000
    magic = from_bits(exponent) * (1.5 * 2.0 ** (23 - MANTISSA))
    return (y + magic) - magic


@triton.jit
def round_bf16(y):
    """Round a finite number to bf16, ties to even; returned as fp32."""
    bits = bits_of(y)
    return from_bits((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536)


@triton.jit
def code_of(y, F: tl.constexpr):
    """Return the code of y, a value over its scale with the zero point added, as a number."""
    y = tl.minimum(tl.maximum(y, F.qmin), F.qmax)
    if F.is_int:
        return round_int(y)
    else:
        return _round_small(y, F.mantissa, F.min_exponent)


@triton.jit
def held(x, KIND: tl.constexpr):
    """Round to the weight's type, saturating at its largest value; returned as fp32."""
    if KIND == _BFLOAT16:
        return round_bf16(tl.minimum(tl.maximum(x, -3.3895314e38), 3.3895314e38))
    elif KIND == _FLOAT16:
        return tl.minimum(tl.maximum(x, -65504.0), 65504.0).to(tl.float16).to(tl.float32)
    else:
        return tl.minimum(tl.maximum(x, -3.4028234663852886e38), 3.4028234663852886e38)


@triton.jit
def raised(x, norm, POWER: tl.constexpr):
    """Return x ** norm of x >= 0; POWER is the norm where that is 1, 2 or 3, else 0."""
    if POWER == 1:
        return x
    elif POWER == 2:
        return x * x
    elif POWER == 3:
        return x * x * x
    else:
        return tl.exp2(norm * tl.log2(x))


@triton.jit
def store_scale(ideal, KIND: tl.constexpr):
    """Return the scale that is stored for an ideal one above zero: finite, and above zero."""
    if KIND == _BFLOAT16:
        bits = bits_of(ideal)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        bits = tl.minimum(bits, 0x7F7F0000)
        return from_bits(tl.maximum(bits, 0x00010000))
    elif KIND == _FLOAT16:
        return tl.maximum(_round_small(tl.minimum(ideal, 65504.0), 10, -14), 2.0**-24)
    elif KIND == _E4M3:
        return tl.maximum(_round_small(tl.minimum(ideal, 448.0), 3, -6), 2.0**-9)
    else:
        return from_bits(tl.maximum(bits_of(tl.minimum(ideal, 3.4028234663852886e38)), 1))


@triton.jit
def _power_of_two(code):
    """Return 2^(code - 127) of a code from 0 to 254."""
    return from_bits(tl.where(code > 0, code << 23, 0x00400000))


@triton.jit
def parameters_of(low, high, divisor, F: tl.constexpr):
    """Return the effective scale and the zero point that are stored for a range.

    divisor: the global scale, where F has one
    """
    low, high = tl.minimum(low, 0.0), tl.maximum(high, 0.0)
    absmax = tl.maximum(-low, high)
    # max - min of the largest finite values overflows; half of it does not
    huge = absmax > 3.4028234663852886e38 / 4
    half = tl.where(huge, 0.5, 1.0)
    if F.scale == _E8M0:
        exponent = ((bits_of(absmax * half) + F.mx_round_bit) & 0x7F800000) >> 23
        stored = _power_of_two(tl.maximum(exponent - F.mx_offset, 0)) * tl.where(huge, 2.0, 1.0)
    else:
        if F.symmetric:
            ideal = tl.div_rn(absmax * half, (F.qmax - F.qmin) / 2)
        else:
            ideal = tl.div_rn(high * half - low * half, F.qmax - F.qmin)
        if F.has_global:
            ideal = divisor * ideal
        ideal = tl.where(ideal == 0, 1.1920929e-07, ideal)  # as compressed-tensors does
        stored = store_scale(ideal * tl.where(huge, 2.0, 1.0), F.scale)
        stored = tl.where(absmax == 0, F.epsilon, stored)
    scale = stored
    if F.has_global:
        scale = tl.div_rn(stored, divisor + tl.zeros_like(stored))
    zero_point = tl.zeros_like(scale)
    if not F.symmetric:
        place = F.qmin - tl.div_rn(low, scale)
        zero_point = round_int(tl.minimum(tl.maximum(place, F.qmin), F.qmax))
    return scale, zero_point
