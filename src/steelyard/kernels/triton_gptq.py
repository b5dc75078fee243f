"""GPTQ's block of columns with Triton; kernels/gptq_rounding.py has the algorithm.

A program has some rows of the weight, and the sums s_j of all columns of the block in registers.
Columns are rounded one after another, and the error of each is added to the sums of those that are
still to come: nothing but values, errors and losses is written.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_grid import nearest_value, row_of

__all__ = ["block_kernel"]


@triton.jit
def block_kernel(
    weight,
    lower,
    sums,
    added,
    scales,
    zero_points,
    group,
    values,
    errors,
    losses,
    columns,
    rows,
    lower_stride,
    F: tl.constexpr,
    KIND: tl.constexpr,
    QUOTIENT: tl.constexpr,
    TIGHT: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Round the columns of a block, the last one first; matrices are (columns, rows)."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = row < rows
    index = tl.arange(0, COLUMNS)
    there = (index < columns)[:, None] & known[None, :]
    s = tl.load(sums + (index.to(tl.int64)[:, None] * rows + row[None, :]), mask=there, other=0.0)
    loss = tl.zeros([ROWS], tl.float64)
    for k in range(0, columns):
        j = columns - 1 - k
        at = tl.cast(j, tl.int64) * rows + row
        w = tl.load(weight + at, mask=known, other=0.0)
        place = tl.load(group + j) * rows + row
        scale = tl.load(scales + place, mask=known, other=1.0)
        zero = tl.zeros([ROWS], tl.float32)
        if not F.symmetric:
            zero = tl.load(zero_points + place, mask=known, other=0.0)
        pivot = tl.load(lower + tl.cast(j, tl.int64) * (lower_stride + 1))
        own = row_of(s, index, j)
        wanted = w + tl.div_rn(own, pivot + tl.zeros_like(own))
        value = nearest_value(wanted, scale, zero, F, KIND, QUOTIENT, TIGHT)
        error = w - value
        tl.store(values + at, value, mask=known)
        tl.store(errors + at, error, mask=known)
        entry = (pivot * error + own).to(tl.float64)
        wide = error.to(tl.float64)
        loss += entry * entry - tl.load(added + j).to(tl.float64) * (wide * wide)
        factor = tl.load(
            lower + tl.cast(j, tl.int64) * lower_stride + index, mask=index < j, other=0.0
        )
        s += factor[:, None] * error[None, :]
    tl.store(losses + row, tl.load(losses + row, mask=known, other=0.0) + loss, mask=known)
