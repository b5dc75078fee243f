"""The shrink-grid search with Triton: one lane tries one candidate, over all members of a group.

A tile is (members, groups, candidates). Its sum over members needs no exchange between lanes, and a
candidate is a scale, its inverse and its sum in registers. Values are divided by multiplying with
the inverse, and errors are counted in units of the scale:

    error = (scale / absmax)^norm * sum of importance * |y - code(y)|^norm,    y = x / scale

Where a tensor has few groups, several programs share the members of one and write their sums, which
are then added in order: at most `_PROGRAMS` sums of each candidate, however large the tensor is.

Patience ends the search of a whole tensor, which programs cannot know while they run. They note
which candidates were better than all before; if the tensor stops before the last of these, the
search runs once more with the candidates up to there.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from steelyard.kernels.triton_codes import CodeFormat, code_of, parameters_of, raised, widened
from steelyard.kernels.triton_launch import (
    Members,
    group_offsets,
    launch,
    member_offsets,
    next_power,
    power_of,
)

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["group_unit", "search_kernel", "search_range", "stop_of"]

_CANDIDATES = 32  # at once: those of a warp
_MEMBERS = 128  # of a tile, over all of its groups
_GROUPS = 4  # of a program, one to a warp
_PROGRAMS = 512  # wanted at least, where a tensor has few groups


@triton.jit
def group_unit(absmax):
    """Return a power of two that keeps tiny and huge groups and their inverses in fp32's range."""
    return tl.where(absmax < 1e-20, 2.0**100, tl.where(absmax > 1e20, 2.0**-60, 1.0))


@triton.jit
def search_kernel(
    values,
    weights,
    low,
    high,
    factors,
    count,
    norm,
    divisor,
    best_low,
    best_high,
    errors,
    better,
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
    w_observation_stride,
    w_outer_stride,
    w_inner_stride,
    w_row_stride,
    w_column_stride,
    tiles_each,
    F: tl.constexpr,
    POWER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    NOTED: tl.constexpr,
    SHARED: tl.constexpr,
    GROUPS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write the best range of each group, or its errors where programs share groups.

    factors: (count,); better: (count,), set where a candidate is better than all before it
    errors:  (programs of a group, groups, count), where `SHARED`
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    known = group < groups
    begin = group_offsets(group, per_row, outer_stride, inner_stride)
    w_begin = group_offsets(group, per_row, w_outer_stride, w_inner_stride)
    least = tl.load(low + group, mask=known, other=0.0)
    most = tl.load(high + group, mask=known, other=0.0)
    absmax = tl.maximum(tl.abs(least), tl.abs(most))
    unit = group_unit(absmax)
    size = tl.where(absmax == 0, 1.0, absmax) * unit
    shared_scale = 1.0
    if F.has_global:
        shared_scale = tl.load(divisor)
    tiles = tl.cdiv(lines, TILE // TILE_COLUMNS) * tl.cdiv(columns, TILE_COLUMNS)
    first = tl.program_id(1) * tiles_each
    last = tl.minimum(first + tiles_each, tiles)
    best_error = tl.full([GROUPS], float("inf"), tl.float32)
    best = tl.zeros([GROUPS], tl.int32)
    for start in range(0, count, CANDIDATES):
        index = start + tl.arange(0, CANDIDATES)
        factor = tl.load(factors + index, mask=index < count, other=1.0)
        scale, zero_point = parameters_of(
            least[:, None] * factor[None, :], most[:, None] * factor[None, :], shared_scale, F
        )
        scale = scale * unit[:, None]
        inverse = tl.div_rn(tl.full([GROUPS, CANDIDATES], 1.0, tl.float32), scale)
        total = tl.zeros([GROUPS, CANDIDATES], tl.float64)
        for tile in range(first, last):
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
            there = there[:, None] & known[None, :]
            x = tl.load(values + (offset[:, None] + begin[None, :]), mask=there, other=0.0)
            y = (widened(x) * unit[None, :])[:, :, None] * inverse[None, :, :]
            if not F.symmetric:
                y = y + zero_point[None, :, :]
            error = raised(tl.abs(y - code_of(y, F)), norm, POWER)
            if WEIGHTED:
                offset, _ = member_offsets(
                    tile,
                    lines,
                    rows,
                    columns,
                    w_observation_stride,
                    w_row_stride,
                    w_column_stride,
                    TILE,
                    TILE_COLUMNS,
                )
                w = tl.load(weights + (offset[:, None] + w_begin[None, :]), mask=there, other=0.0)
                error = error * w[:, :, None]
            total += tl.sum(error, 0).to(tl.float64)
        found = total.to(tl.float32) * raised(tl.div_rn(scale, size[:, None]), norm, POWER)
        if SHARED:
            row = (tl.program_id(1) * groups + group).to(tl.int64) * count
            place = errors + (row[:, None] + index[None, :])
            tl.store(place, found, mask=known[:, None] & (index < count)[None, :])
        else:
            usable = (found == found) & (index < count)[None, :]
            found = tl.where(usable, found, float("inf"))
            if NOTED:
                before = tl.where(
                    index[None, :, None] > index[None, None, :], found[:, None, :], float("inf")
                )
                before = tl.minimum(tl.min(before, 2), best_error[:, None])
                gains = tl.max(((found < before) & known[:, None]).to(tl.int32), 0)
                tl.store(better + index, 1, mask=(gains > 0) & (index < count))
            lowest = tl.min(found, 1)
            where = tl.min(tl.where(found == lowest[:, None], index[None, :], count), 1)
            improves = lowest < best_error
            best = tl.where(improves, where, best)
            best_error = tl.where(improves, lowest, best_error)
    if not SHARED:
        factor = tl.load(factors + best)
        tl.store(best_low + group, least * factor, mask=known)
        tl.store(best_high + group, most * factor, mask=known)


def search_range(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    norm: float,
    patience: int,
    importance: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    observed_range: tuple[torch.Tensor, torch.Tensor],
    group_dims: int = 1,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `kernels.grid_search.search_range`."""
    from steelyard.kernels.grid_search import first_best

    low, high = (each.contiguous() for each in observed_range)
    members, view, weight_strides, weights = Members.of(observed, group_dims, importance)
    at_once = min(next_power(members.groups), _GROUPS)
    tile = members.tile(_MEMBERS // at_once)
    tiles = members.tiles(tile)
    programs = -(-members.groups // at_once)
    each = max(16, -(-tiles * programs // _PROGRAMS))
    shares = -(-tiles // each)
    table = torch.tensor(list(factors), dtype=torch.float32, device=observed.device)
    divisor = None if global_scale is None else global_scale.to(low)
    errors = better = None
    if shares > 1:
        errors = low.new_empty(shares, members.groups, len(table))
    best = low, high
    if not in_place:
        best = torch.empty_like(low), torch.empty_like(high)
    if patience > 0 and shares == 1:
        better = torch.zeros(len(table), dtype=torch.int32, device=observed.device)
        if in_place:
            best = torch.empty_like(low), torch.empty_like(high)

    def run(count: int, noted: torch.Tensor | None) -> None:
        launch(
            search_kernel,
            (programs, shares),
            view,
            view,
            weights,
            low,
            high,
            table,
            count,
            norm,
            divisor,
            *best,
            errors,
            noted,
            *members,
            *weight_strides,
            each if shares > 1 else tiles,
            F=CodeFormat.of(args, scale_dtype, global_scale is not None),
            POWER=power_of(norm),
            WEIGHTED=weights is not None,
            NOTED=noted is not None,
            SHARED=shares > 1,
            GROUPS=at_once,
            CANDIDATES=_CANDIDATES,
            TILE=tile[0],
            TILE_COLUMNS=tile[1],
            num_warps=4,
        )

    run(len(table), better)
    if errors is not None:
        factor = table[first_best(errors.sum(0).t(), patience)].reshape(low.shape)
        return low * factor, high * factor
    if better is not None:
        gains = [bool(each) for each in better.tolist()]
        stop = stop_of(gains, patience)
        if any(gains[stop:]):
            run(stop, None)
    return best


def stop_of(better: Sequence[bool], patience: int) -> int:
    """Return how many candidates a tensor tries, given which of them were better for any group.

    >>> stop_of([True, True, False, False, True], 2)
    4
    """
    idle = 0
    for i in range(1, len(better)):
        idle = 0 if better[i] else idle + 1
        if idle >= patience:
            return i + 1
    return len(better)
