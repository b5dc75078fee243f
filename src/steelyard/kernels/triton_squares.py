"""Sums of squares per column with Triton."""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from steelyard.kernels.triton_codes import widened
from steelyard.kernels.triton_launch import launch, next_power

__all__ = ["squares_kernel", "sum_of_squares"]

_COLUMNS = 128  # of a program
_ROWS = 16  # of a tile
_PROGRAMS = 512  # wanted at least


@triton.jit
def squares_kernel(
    values,
    sums,
    rows,
    columns,
    row_stride,
    column_stride,
    rows_each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write the sums of some rows: (programs of a column, columns)."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    share = tl.program_id(1)
    last = tl.minimum((share + 1) * rows_each, rows)
    total = tl.zeros([COLUMNS], tl.float64)
    for start in range(share * rows_each, last, ROWS):
        row = start + tl.arange(0, ROWS)
        there = (row < last)[:, None] & (column < columns)[None, :]
        place = row.to(tl.int64)[:, None] * row_stride + (column * column_stride)[None, :]
        x = widened(tl.load(values + place, mask=there, other=0.0))
        total += tl.sum(x * x, 0).to(tl.float64)
    at = share.to(tl.int64) * columns + column
    tl.store(sums + at, total.to(tl.float32), mask=column < columns)


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """As `kernels.squares.sum_of_squares`."""
    flat = x.detach().reshape(-1, x.shape[-1])
    rows, columns = flat.shape
    wide = min(next_power(columns), _COLUMNS)
    programs = -(-columns // wide)
    shares = min(-(-rows // (8 * _ROWS)), max(1, _PROGRAMS // programs))
    each = -(-rows // max(shares, 1))
    sums = torch.empty(max(shares, 1), columns, device=x.device)
    launch(
        squares_kernel,
        (programs, len(sums)),
        flat,
        flat,
        sums,
        rows,
        columns,
        *flat.stride(),
        each,
        ROWS=_ROWS,
        COLUMNS=wide,
        num_warps=4,
    )
    return sums[0] if len(sums) == 1 else sums.sum(0)
