"""The scales that a type stores, in order, for Triton's kernels: codes, and the value of each.

For fp32, those that bf16 stores too. KIND is that of `kernels.compiled.SCALE_TYPES`.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_codes import bits_of, from_bits

__all__ = ["code_at_or_above", "code_value", "first_code", "halves_above", "last_code"]

_FLOAT16 = tl.constexpr(1)
_E4M3 = tl.constexpr(3)
_E8M0 = tl.constexpr(4)


@triton.jit
def first_code(KIND: tl.constexpr):
    if KIND == _E8M0:
        return 0
    else:
        return 1


@triton.jit
def last_code(KIND: tl.constexpr):
    if KIND == _FLOAT16:
        return 0x7BFF
    elif KIND == _E4M3:
        return 0x7E
    elif KIND == _E8M0:
        return 254
    else:
        return 0x7F7F


@triton.jit
def halves_above(KIND: tl.constexpr):
    """Return the scale from which half of a code is a code."""
    if KIND == _FLOAT16:
        return 2.0**-13
    elif KIND == _E4M3:
        return 2.0**-5
    elif KIND == _E8M0:
        return 2.0**-126
    else:
        return 2.0**-125


@triton.jit
def code_value(code, KIND: tl.constexpr):
    """Return the scale of a code, fp32."""
    if KIND == _FLOAT16:
        small = code.to(tl.float32) * 2.0**-24
        return tl.where(code < 1 << 10, small, from_bits((code + (112 << 10)) << 13))
    elif KIND == _E4M3:
        small = code.to(tl.float32) * 2.0**-9
        return tl.where(code < 1 << 3, small, from_bits((code + (120 << 3)) << 20))
    elif KIND == _E8M0:
        return from_bits(tl.where(code > 0, code << 23, 0x00400000))
    else:
        return from_bits(code << 16)


@triton.jit
def code_at_or_above(wanted, KIND: tl.constexpr):
    """Return the least code whose scale is not below a wanted one; the last where none is."""
    bits = bits_of(wanted)
    if KIND == _FLOAT16:
        small = tl.ceil(tl.minimum(wanted, 1.0) * 2.0**24).to(tl.int32)
        code = tl.where(wanted < 2.0**-14, small, ((bits + 0x1FFF) >> 13) - (112 << 10))
    elif KIND == _E4M3:
        small = tl.ceil(tl.minimum(wanted, 1.0) * 2.0**9).to(tl.int32)
        code = tl.where(wanted < 2.0**-6, small, ((bits + 0xFFFFF) >> 20) - (120 << 3))
    elif KIND == _E8M0:
        code = tl.where(bits <= 0x00400000, 0, (bits + 0x7FFFFF) >> 23)
    else:
        code = (bits + 0xFFFF) >> 16
    return tl.minimum(tl.maximum(code, first_code(KIND)), last_code(KIND))
