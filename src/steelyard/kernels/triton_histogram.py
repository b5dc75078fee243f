"""Counts of values in bins with Triton.

A program counts its values in shared memory and adds the counts to the histogram once, as integers:
the result does not depend on the order of programs.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from steelyard.kernels.triton_codes import from_bits, widened
from steelyard.kernels.triton_launch import Members, group_offsets, launch, member_offsets

__all__ = ["add_counts", "histogram_kernel"]

_ELEMENTS = 4096  # of a tile
_PROGRAMS = 512  # that share one group


@triton.jit
def histogram_kernel(
    values,
    histogram,
    groups,
    per_row,
    lines,
    rows,
    columns,
    observation_stride,
    outer_stride,
    inner_stride,
    row_stride,
    column_stride,
    tiles_each,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Add the counts of one group: (groups, 1 + BINS) int64, its exponent first."""
    group = tl.program_id(0)
    begin = group_offsets(group, per_row, outer_stride, inner_stride)
    first = tl.program_id(1) * tiles_each
    tiles = tl.cdiv(lines, TILE // TILE_COLUMNS) * tl.cdiv(columns, TILE_COLUMNS)
    bins = histogram + group.to(tl.int64) * (1 + BINS)
    inverse = from_bits((127 - tl.load(bins).to(tl.int32)) << 23)  # of the bins' width
    counts = tl.zeros([BINS], tl.int32)
    for tile in range(first, tl.minimum(first + tiles_each, tiles)):
        offset, there = member_offsets(
            tile,
            lines,
            rows,
            columns,
            observation_stride,
            row_stride,
            column_stride,
            TILE,
            TILE_COLUMNS,
        )
        x = widened(tl.load(values + (begin + offset), mask=there, other=0.0))
        place = (tl.abs(x) * inverse).to(tl.int32)
        place = tl.where(x < 0, -1 - place, place) + BINS // 2
        counts += tl.histogram(place, BINS, mask=there)
    each = tl.arange(0, BINS)
    tl.atomic_add(bins + 1 + each, counts.to(tl.int64), mask=counts > 0)


def add_counts(observed: torch.Tensor, histogram: torch.Tensor, group_dims: int = 1) -> None:
    """Add to a histogram in place; `kernels.bin_counts` defines it."""
    members, view, _, _ = Members.of(observed, group_dims)
    tile = members.tile(_ELEMENTS)
    tiles = members.tiles(tile)
    each = max(8, -(-tiles * members.groups // _PROGRAMS))
    launch(
        histogram_kernel,
        (members.groups, -(-tiles // each)),
        view,
        view,
        histogram,
        *members,
        each,
        BINS=histogram.shape[-1] - 1,
        TILE=tile[0],
        TILE_COLUMNS=tile[1],
        num_warps=4,
    )
