"""The coordinate-descent sweep after GPTQ with Triton; kernels/gptq_refine.py has the algorithm.

A program has some rows of the weight: the values of a block of columns and its sums, H e, stay in
registers while scales and codes move. Groups come one after another, and so do the columns in them.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_codes import bits_of, code_of, from_bits, held, store_scale
from steelyard.kernels.triton_grid import nearest_value, row_of, with_row

__all__ = ["refine_kernel"]

_E8M0 = tl.constexpr(4)
_TRIES = tl.constexpr(2)  # as in gptq_refine.py


@triton.jit
def _stored_near(scale, divisor, F: tl.constexpr):
    """Return the size of the stored scale nearest to a wanted one, before its global scale."""
    wanted = tl.abs(scale)
    if F.has_global:
        wanted = wanted * divisor
    if F.scale == _E8M0:
        power = from_bits(tl.maximum(bits_of(wanted) & 0x7F800000, 0x00800000))
        near = tl.where(wanted < 1.5 * power, power, 2 * power)
        return tl.minimum(near, 2.0**127)
    else:
        return store_scale(wanted, F.scale)


@triton.jit
def _read(stored, scale, divisor, F: tl.constexpr):
    """Return a stored size as the server reads it, with the sign of `scale`."""
    if F.has_global:
        stored = tl.div_rn(stored, divisor + tl.zeros_like(stored))
    return tl.where(scale < 0, -stored, stored)


@triton.jit
def _beside(stored, UP: tl.constexpr, F: tl.constexpr):
    """Return the next scale of one byte below or above; the same where there is none."""
    if F.scale == _E8M0:
        return tl.minimum(stored * 2, 2.0**127) if UP else tl.maximum(stored * 0.5, 2.0**-127)
    else:
        power = from_bits(bits_of(stored) & 0x7F800000)
        gap = tl.maximum(power, 2.0**-6) * 0.125
        halved = (stored == power) & (power > 2.0**-6)
        low = tl.maximum(stored - tl.where(halved, gap * 0.5, gap), 2.0**-9)
        return tl.minimum(stored + gap, 448.0) if UP else low


@triton.jit
def _product(matrix, index, first, last, hessian, columns):
    """Return H m of the rows from `first` to before `last` of a matrix."""
    total = tl.zeros_like(matrix)
    for j in range(first, last):
        h = tl.load(hessian + j * columns + index, mask=index < columns, other=0.0)
        total += h[:, None] * row_of(matrix, index, j)[None, :]
    return total


@triton.jit
def _sweep(
    s,
    v,
    index,
    first,
    last,
    hessian,
    columns,
    scale,
    zero,
    FORCED: tl.constexpr,
    F: tl.constexpr,
    KIND: tl.constexpr,
    QUOTIENT: tl.constexpr,
    TIGHT: tl.constexpr,
):
    """Move the codes of some columns, one after another; return sums, values and the gain.

    FORCED: take the nearest code in each column, though it may be worse: the scale is another
    """
    gain = tl.zeros_like(scale)
    for j in range(first, last):
        h = tl.load(hessian + j * columns + index, mask=index < columns, other=0.0)
        pivot = tl.load(hessian + j * columns + j)
        own, value = row_of(s, index, j), row_of(v, index, j)
        wanted = value + tl.div_rn(own, pivot + tl.zeros_like(own))
        step = nearest_value(wanted, scale, zero, F, KIND, QUOTIENT, TIGHT) - value
        better = step * (2 * own - pivot * step)
        if not FORCED:
            step = tl.where(better > 0, step, 0.0)
        gain += tl.where(step == 0, 0.0, better)
        s -= h[:, None] * step[None, :]
        v = with_row(v, index, j, value + step)
    return s, v, gain


@triton.jit
def refine_kernel(
    hessian,
    sums,
    scales,
    zero_points,
    group,
    divisor,
    values,
    errors,
    columns,
    rows,
    F: tl.constexpr,
    KIND: tl.constexpr,
    QUOTIENT: tl.constexpr,
    TIGHT: tl.constexpr,
    FIT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Move the scales, if `FIT`, and the codes of a block of whole groups, in place."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    index = tl.arange(0, COLUMNS)
    there = (index < columns)[:, None] & known[None, :]
    place = index.to(tl.int64)[:, None] * rows + row[None, :]
    s = tl.load(sums + place, mask=there, other=0.0)
    v = tl.load(values + place, mask=there, other=0.0)
    shared = 1.0
    if F.has_global:
        shared = tl.load(divisor)
    COARSE: tl.constexpr = F.scale == 3 or F.scale == 4
    first = 0
    while first < columns:
        mine = tl.load(group + first)
        ids = tl.load(group + index, mask=index < columns, other=-1)
        last = first + tl.sum(((ids == mine) & (index >= first)).to(tl.int32), 0)
        at = mine * rows + row
        scale = tl.load(scales + at, mask=known, other=1.0)
        zero = tl.zeros([ROWS], tl.float32)
        if not F.symmetric:
            zero = tl.load(zero_points + at, mask=known, other=0.0)
        inside = ((index >= first) & (index < last))[:, None]
        if FIT:
            codes = code_of(tl.div_rn(v, scale[None, :] + tl.zeros_like(v)) + zero[None, :], F)
            codes = tl.where(inside, codes - zero[None, :], 0.0)
            pull = tl.sum(codes * s, 0)
            curvature = tl.sum(codes * _product(codes, index, first, last, hessian, columns), 0)
            wanted = scale + tl.div_rn(pull, curvature)
            usable = (wanted * scale > 0) & (tl.abs(wanted) < float("inf"))
            near = _stored_near(tl.where(usable, wanted, scale), shared, F)
            moved = _read(near, scale, shared, F)
            became = held(codes * moved[None, :], KIND)
            step = tl.where(inside, became - v, 0.0)
            product = _product(step, index, first, last, hessian, columns)
            gain = tl.sum(step * (2 * s - product), 0)
            better = usable & (gain > 0)
            scale = tl.where(better, moved, scale)
            s = tl.where(better[None, :], s - product, s)
            v = tl.where(better[None, :] & inside, became, v)
            if COARSE:
                s, v, gain = _sweep(
                    s, v, index, first, last, hessian, columns, scale, zero,
                    False, F, KIND, QUOTIENT, TIGHT,
                )  # fmt: skip
                stored = _stored_near(scale, shared, F)
                for up in tl.static_range(2):
                    trial = _read(_beside(stored, up == 1, F), scale, shared, F)
                    trial_s, trial_v, gain = _sweep(
                        s, v, index, first, last, hessian, columns, trial, zero,
                        True, F, KIND, QUOTIENT, TIGHT,
                    )  # fmt: skip
                    for _ in tl.static_range(_TRIES - 1):
                        trial_s, trial_v, more = _sweep(
                            trial_s, trial_v, index, first, last, hessian, columns, trial, zero,
                            True, F, KIND, QUOTIENT, TIGHT,
                        )  # fmt: skip
                        gain += more
                    better = (gain > 0) & (trial != scale)
                    scale = tl.where(better, trial, scale)
                    s = tl.where(better[None, :], trial_s, s)
                    v = tl.where(better[None, :], trial_v, v)
            tl.store(scales + at, scale, mask=known)
        s, v, gain = _sweep(
            s, v, index, first, last, hessian, columns, scale, zero,
            False, F, KIND, QUOTIENT, TIGHT,
        )  # fmt: skip
        first = last
    before = tl.load(values + place, mask=there, other=0.0)
    error = tl.load(errors + place, mask=there, other=0.0)
    tl.store(errors + place, error + (before - v), mask=there)
    tl.store(values + place, v, mask=there)
