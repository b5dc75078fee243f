"""Ranges per group with Triton, in one pass.

Floats are compared as integers of the same order, in which a positive NaN is above and a negative
one below everything else: a NaN stays visible. Where one group needs several programs, these join
by atomic minimum and maximum: no order of programs changes the result, and none is stored in parts.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import torch
import triton
import triton.language as tl

from steelyard.kernels.triton_codes import bits_of, widened
from steelyard.kernels.triton_launch import (
    Members,
    group_offsets,
    launch,
    member_offsets,
    next_power,
)

__all__ = ["range_kernel", "range_of"]

_ELEMENTS = 2048  # of a tile, over all of its groups
_PROGRAMS = 1024  # that share one group


@triton.jit
def range_kernel(
    values,
    low,
    high,
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
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    SHARED: tl.constexpr,
):
    """Write the extremes of each group: bits of floats, or ordered integers where `SHARED`."""
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    known = group < groups
    begin = group_offsets(group, per_row, outer_stride, inner_stride)
    first = tl.program_id(1) * tiles_each
    tiles = tl.cdiv(lines, TILE // TILE_COLUMNS) * tl.cdiv(columns, TILE_COLUMNS)
    least = tl.full([GROUPS, TILE], 0x7FFFFFFF, tl.int32)
    most = tl.full([GROUPS, TILE], -0x7FFFFFFF, tl.int32)
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
        there = known[:, None] & there[None, :]
        place = values + begin[:, None] + offset[None, :]
        bits = bits_of(widened(tl.load(place, mask=there, other=0.0)))
        key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
        least = tl.minimum(least, tl.where(there, key, 0x7FFFFFFF))
        most = tl.maximum(most, tl.where(there, key, -0x7FFFFFFF))
    smallest, largest = tl.min(least, 1), tl.max(most, 1)
    if SHARED:
        tl.atomic_min(low + group, smallest, mask=known)
        tl.atomic_max(high + group, largest, mask=known)
    else:
        tl.store(low + group, smallest ^ ((smallest >> 31) & 0x7FFFFFFF), mask=known)
        tl.store(high + group, largest ^ ((largest >> 31) & 0x7FFFFFFF), mask=known)


def range_of(observed: torch.Tensor, group_dims: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.range.range_of`."""
    members, view, _, _ = Members.of(observed, group_dims)
    tile = members.tile(_ELEMENTS)
    at_once = min(next_power(members.groups), max(1, _ELEMENTS // tile[0]))
    programs = -(-members.groups // at_once)
    shares = min(members.tiles(tile), max(1, _PROGRAMS // programs))
    each = -(-members.tiles(tile) // shares)
    shape = tuple(observed.shape[1:-group_dims])
    low = torch.full(shape, 0x7FFFFFFF, dtype=torch.int32, device=observed.device)
    high = torch.full(shape, -0x7FFFFFFF, dtype=torch.int32, device=observed.device)
    launch(
        range_kernel,
        (programs, -(-members.tiles(tile) // each)),
        view,
        view,
        low,
        high,
        *members,
        each,
        GROUPS=at_once,
        TILE=tile[0],
        TILE_COLUMNS=tile[1],
        SHARED=each < members.tiles(tile),
        num_warps=4,
    )
    if each < members.tiles(tile):
        low, high = (key ^ ((key >> 31) & 0x7FFFFFFF) for key in (low, high))
    return low.view(torch.float32), high.view(torch.float32)
