"""The exact search with Triton: one program per group, one lane per candidate.

kernels/optimal_search.py has the algorithm, and the reasons why codes above and below need not be
tried. Here codes are tried in blocks: from the first unclipped one down, until clipping alone costs
more than the best error at the smallest code of a block, and then up. A candidate of an asymmetric
integer is a code with a zero point, tried in windows from the middle up and down.

Errors of a tile are summed in fp32, tiles in fp64. Scales that are exactly as good, s and -s or a
power of two and its half, have exactly equal sums, so the first tried stays, as in the reference.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from steelyard.kernels.triton_codes import CodeFormat, parameters_of, raised, round_int
from steelyard.kernels.triton_launch import Members, group_offsets, launch, power_of
from steelyard.kernels.triton_scales import (
    code_at_or_above,
    code_value,
    first_code,
    halves_above,
    last_code,
)
from steelyard.kernels.triton_search import group_unit
from steelyard.kernels.triton_sums import clipped_error, fitted_scale, lane_errors, weighed_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["optimal_kernel", "optimal_qparams"]

_LONG = 2048  # members from which a group has four warps
_MEMBERS = 32  # of a tile
_ZERO_POINTS = 8  # of a window


@triton.jit
def _better(errors, stored, zero_point, usable, best, scale, zero):
    """Return the best of the lanes and of what was found before: error, scale, zero point."""
    lane = tl.arange(0, errors.shape[0])
    errors = tl.where(usable & (errors == errors), errors, float("inf"))
    lowest = tl.min(errors, 0)
    at = tl.min(tl.where(errors == lowest, lane, errors.shape[0]), 0)
    improves = lowest < best * (1 - 1e-12)
    found = tl.sum(tl.where(lane == at, stored, 0.0), 0)
    found_zero = tl.sum(tl.where(lane == at, zero_point, 0.0), 0)
    return (
        tl.where(improves, lowest, best),
        tl.where(improves, found, scale),
        tl.where(improves, found_zero, zero),
    )


@triton.jit
def optimal_kernel(
    values,
    weights,
    low,
    high,
    divisor,
    scales,
    zero_points,
    norm,
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
    F: tl.constexpr,
    POWER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SIGNS: tl.constexpr,
    CANDIDATES: tl.constexpr,
    ZEROS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Write the best stored scale and zero point of one group; 0 where nothing weighs.

    SIGNS: 1, or 2 to try negative scales too; ZEROS: zero points of a window, 1 if symmetric
    """
    group = tl.program_id(0)
    here = values + group_offsets(group, per_row, outer_stride, inner_stride)
    shape = (lines, rows, columns, observation_stride, row_stride, column_stride)
    w_here = weights
    w_shape = shape
    if WEIGHTED:
        w_here = weights + group_offsets(group, per_row, w_outer_stride, w_inner_stride)
        w_shape = (lines, rows, columns, w_observation_stride, w_row_stride, w_column_stride)
    observed_low, observed_high = tl.load(low + group), tl.load(high + group)
    absmax = tl.maximum(tl.abs(observed_low), tl.abs(observed_high))
    unit = group_unit(absmax)
    size = tl.where(absmax == 0, 1.0, absmax) * unit
    least, most = observed_low, observed_high
    if WEIGHTED:
        least, most = weighed_range(here, w_here, shape, w_shape, TILE, TILE_COLUMNS)
    shared_scale = 1.0
    if F.has_global:
        shared_scale = tl.load(divisor)
    lane = tl.arange(0, CANDIDATES)
    step = lane // ZEROS  # of the code
    aside = (lane % ZEROS).to(tl.float32)  # of the zero point
    ones = tl.full([CANDIDATES], 1.0, tl.float32)
    CODES: tl.constexpr = CANDIDATES // ZEROS
    best = tl.full([], float("inf"), tl.float64)
    scale = tl.full([], 0.0, tl.float32)
    zero = tl.full([], 0.0, tl.float32)
    for turn in tl.static_range(SIGNS):
        sign = 1.0 - 2.0 * turn
        bottom = tl.minimum(least if turn == 0 else -most, 0.0)
        top = tl.maximum(most if turn == 0 else -least, 0.0)
        signed_unit = unit * sign
        if F.symmetric:
            unclipped = tl.maximum(tl.div_rn(top, F.qmax), tl.div_rn(bottom, F.qmin))
        else:
            span: tl.constexpr = F.qmax - F.qmin - 2
            unclipped = tl.div_rn(top, span) - tl.div_rn(bottom, span)
        wanted = unclipped * shared_scale
        start = code_at_or_above(wanted, F.scale)
        bound = tl.maximum(2 * wanted * (1 + 1e-6), halves_above(F.scale))
        code = start
        direction = tl.full([], -1, tl.int32)  # down, then up
        going = (unclipped > 0) & (best > 0)
        while going:
            tried = code + direction * step
            usable = (tried >= first_code(F.scale)) & (tried <= last_code(F.scale))
            stored = code_value(tl.where(usable, tried, start), F.scale)
            usable = usable & ((direction < 0) | (stored < bound))
            effective = stored
            if F.has_global:
                effective = tl.div_rn(stored, shared_scale * ones)
            ratio = raised(tl.div_rn(effective * unit, size * ones), norm, POWER)
            inverse = tl.div_rn(ones, effective * unit)
            if F.symmetric:
                total, _, _ = lane_errors(
                    here, w_here, shape, w_shape, inverse, ones, signed_unit, norm,
                    F, POWER, WEIGHTED, False, TILE, TILE_COLUMNS,
                )  # fmt: skip
                best, scale, zero = _better(
                    total * ratio, stored * sign, ones * 0, usable, best, scale, zero
                )
                last = tl.sum(tl.where(lane == CANDIDATES - 1, effective, 0.0), 0)
                clipped = clipped_error(
                    here, w_here, shape, w_shape, last * unit, size, signed_unit, norm,
                    F, POWER, WEIGHTED, TILE, TILE_COLUMNS,
                )  # fmt: skip
                possible = clipped <= best
            else:
                middle = F.qmin - tl.div_rn(bottom * ones, effective)
                middle = round_int(tl.minimum(tl.maximum(middle, F.qmin), F.qmax))
                candidate = middle + aside
                slope = tl.full([], 1.0, tl.float32)  # windows above the middle, then below it
                possible = best < 0
                more = best > 0
                while more:
                    valid = usable & (candidate >= F.qmin) & (candidate <= F.qmax)
                    known = tl.minimum(tl.maximum(candidate, F.qmin), F.qmax)
                    total, below, above = lane_errors(
                        here, w_here, shape, w_shape, inverse, known, signed_unit, norm,
                        F, POWER, WEIGHTED, True, TILE, TILE_COLUMNS,
                    )  # fmt: skip
                    best, scale, zero = _better(
                        total * ratio, stored, known, valid, best, scale, zero
                    )
                    chance = valid & (step == CODES - 1) & ((below + above) * ratio <= best)
                    possible = possible | (tl.max(chance.to(tl.int32), 0) > 0)
                    beyond = tl.where(slope > 0, above, below) * ratio
                    further = valid & (aside == ZEROS - 1) & (beyond <= best)
                    more = tl.max(further.to(tl.int32), 0) > 0
                    turns = (slope > 0) & (more == 0)
                    candidate = tl.where(turns, middle - 1 - aside, candidate + slope * ZEROS)
                    slope = tl.where(turns, -1.0, slope)
                    more = (more | turns) & (best > 0)
            code = code + direction * CODES
            inside = (code >= first_code(F.scale)) & (code <= last_code(F.scale))
            within = code_value(tl.where(inside, code, start), F.scale) < bound
            going = inside & tl.where(direction < 0, possible, within)
            turns = (direction < 0) & (going == 0)
            code = tl.where(turns, start + 1, code)
            direction = tl.where(turns, 1, direction)
            above_start = tl.minimum(start + 1, last_code(F.scale))
            rises = (start < last_code(F.scale)) & (code_value(above_start, F.scale) < bound)
            going = (going | (turns & rises)) & (best > 0)
        if F.scale == 0:
            # of fp32 scales only bf16's were tried: the one of the range, then least squares
            fitted = tl.abs(scale)
            fitted_zero = zero
            if turn == 0:
                fitted, fitted_zero = parameters_of(observed_low, observed_high, shared_scale, F)
                fitted = fitted * shared_scale
            rounds = tl.full([], 0, tl.int32)
            more = (unclipped > 0) & (best > 0) & (scale * sign > 0)
            while more:
                stored = fitted * ones
                usable = (stored > 0) & (stored < float("inf")) & (lane == 0)
                stored = tl.where(usable, stored, 1.0)
                effective = tl.div_rn(stored, shared_scale * ones)
                ratio = raised(tl.div_rn(effective * unit, size * ones), norm, POWER)
                inverse = tl.div_rn(ones, effective * unit)
                total, _, _ = lane_errors(
                    here, w_here, shape, w_shape, inverse, fitted_zero * ones, signed_unit, norm,
                    F, POWER, WEIGHTED, False, TILE, TILE_COLUMNS,
                )  # fmt: skip
                before = scale
                best, scale, zero = _better(
                    total * ratio, stored * sign, fitted_zero * ones, usable,
                    best, scale, zero,
                )  # fmt: skip
                effective_best = tl.div_rn(tl.abs(scale), shared_scale)
                fitted = fitted_scale(
                    here, w_here, shape, w_shape, effective_best * unit, zero, signed_unit, norm,
                    F, POWER, WEIGHTED, TILE, TILE_COLUMNS,
                )  # fmt: skip
                fitted = tl.div_rn(fitted, unit) * shared_scale
                fitted_zero = zero
                more = ((rounds == 0) | (scale != before)) & (rounds < 8) & (best > 0)
                rounds += 1
    tl.store(scales + group, scale)
    if not F.symmetric:
        tl.store(zero_points + group, zero)


def optimal_qparams(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    importance: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    observed_range: tuple[torch.Tensor, torch.Tensor],
    negative_scales: bool = False,
    group_dims: int = 1,
    norm: float = 2.0,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `kernels.compiled.optimal_qparams`."""
    low, high = (each.contiguous() for each in observed_range)
    members, view, weight_strides, weights = Members.of(observed, group_dims, importance)
    tile = members.tile(_MEMBERS)
    warps = 4 if members.lines * members.columns >= _LONG else 1
    scale = torch.empty_like(low)
    zero_point = None if args.symmetric else torch.empty_like(low)
    launch(
        optimal_kernel,
        (members.groups,),
        view,
        view,
        weights,
        low,
        high,
        None if global_scale is None else global_scale.to(low),
        scale,
        zero_point,
        norm,
        *members,
        *weight_strides,
        F=CodeFormat.of(args, scale_dtype, global_scale is not None),
        POWER=power_of(norm),
        WEIGHTED=weights is not None,
        SIGNS=2 if negative_scales else 1,
        CANDIDATES=32 * warps,
        ZEROS=1 if args.symmetric else _ZERO_POINTS,
        TILE=tile[0],
        TILE_COLUMNS=tile[1],
        num_warps=warps,
    )
    return scale, zero_point
