"""Stored values nearest to wanted ones, for Triton's kernels of GPTQ; as in gptq_grid.py."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_codes import code_of, held, round_int

__all__ = ["nearest_value", "row_of", "with_row"]


@triton.jit
def row_of(matrix, index, at):
    """Return one row of a matrix in registers; `index` numbers its rows."""
    return tl.sum(tl.where(index[:, None] == at, matrix, 0.0), 0)


@triton.jit
def with_row(matrix, index, at, row):
    """Return the matrix with another row."""
    return tl.where(index[:, None] == at, row[None, :], matrix)


@triton.jit
def _kept(code, scale, zero, F: tl.constexpr, KIND: tl.constexpr, QUOTIENT: tl.constexpr):
    """Whether a decoded value packs to the code that it came from."""
    value = held((code - zero) * scale, KIND)
    if QUOTIENT != 0:
        y = held(held(tl.div_rn(value, held(scale, QUOTIENT)), QUOTIENT) + zero, QUOTIENT)
    else:
        y = tl.div_rn(value, scale) + zero
    return round_int(tl.minimum(tl.maximum(y, F.qmin), F.qmax)) == code


@triton.jit
def nearest_value(
    x,
    scale,
    zero,
    F: tl.constexpr,
    KIND: tl.constexpr,
    QUOTIENT: tl.constexpr,
    TIGHT: tl.constexpr,
):
    """Return the stored values nearest to x, fp32.

    KIND:     the weight's type, as in SCALE_TYPES; QUOTIENT: that in which packing divides
    TIGHT:    whether a decoded value may pack to another code, and must be checked
    """
    y = tl.div_rn(x, scale) + zero
    code = code_of(y, F)
    if TIGHT:
        place = tl.minimum(tl.maximum(y, F.qmin), F.qmax)
        step = tl.where(place > code, 1.0, -1.0)
        beside = tl.minimum(tl.maximum(code + step, F.qmin), F.qmax)
        opposite = tl.minimum(tl.maximum(code - step, F.qmin), F.qmax)
        other = tl.where(_kept(opposite, scale, zero, F, KIND, QUOTIENT), opposite, code)
        other = tl.where(_kept(beside, scale, zero, F, KIND, QUOTIENT), beside, other)
        code = tl.where(_kept(code, scale, zero, F, KIND, QUOTIENT), code, other)
    return held((code - zero) * scale, KIND)
