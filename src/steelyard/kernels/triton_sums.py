"""Sums over the members of one group, for Triton's exact search.

`shape` has the lines, rows and columns of a group and three strides, as `triton_launch.Members`;
`w_shape` those of the weights. A scale is in units of the group, as are the values: `unit` is a
power of two, and negative where negative scales are tried.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

import triton
import triton.language as tl

from steelyard.kernels.triton_codes import code_of, raised, widened
from steelyard.kernels.triton_launch import member_offsets

__all__ = ["clipped_error", "fitted_scale", "lane_errors", "weighed_range"]


@triton.jit
def _tiles(shape, TILE: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    return tl.cdiv(shape[0], TILE // TILE_COLUMNS) * tl.cdiv(shape[2], TILE_COLUMNS)


@triton.jit
def _members(place, tile, shape, TILE: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return the members of a tile, fp32, and which exist; 0 for the others."""
    offset, there = member_offsets(
        tile, shape[0], shape[1], shape[2], shape[3], shape[4], shape[5], TILE, TILE_COLUMNS
    )
    return widened(tl.load(place + offset, mask=there, other=0.0)), there


@triton.jit
def weighed_range(values, weights, shape, w_shape, TILE: tl.constexpr, TILE_COLUMNS: tl.constexpr):
    """Return the smallest and the largest member of weight, at most and at least 0."""
    least = tl.zeros([TILE], tl.float32)
    most = tl.zeros([TILE], tl.float32)
    for tile in range(0, _tiles(shape, TILE, TILE_COLUMNS)):
        x, _ = _members(values, tile, shape, TILE, TILE_COLUMNS)
        w, _ = _members(weights, tile, w_shape, TILE, TILE_COLUMNS)
        x = tl.where(w > 0, x, 0.0)
        least, most = tl.minimum(least, x), tl.maximum(most, x)
    return tl.min(least, 0), tl.max(most, 0)


@triton.jit
def lane_errors(
    values,
    weights,
    shape,
    w_shape,
    inverse,
    zero_point,
    unit,
    norm,
    F: tl.constexpr,
    POWER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    CLIPPED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Return, for each lane's scale and zero point, the error in units of the scale.

    Also the errors of members below and above what can be represented, where `CLIPPED`.
    """
    total = tl.zeros([inverse.shape[0]], tl.float64)
    below = tl.zeros([inverse.shape[0]], tl.float64)
    above = tl.zeros([inverse.shape[0]], tl.float64)
    for tile in range(0, _tiles(shape, TILE, TILE_COLUMNS)):
        x, _ = _members(values, tile, shape, TILE, TILE_COLUMNS)
        exact = (x * unit)[:, None] * inverse[None, :]
        y = exact
        code = code_of(y, F)
        if not F.symmetric:
            # the difference without the zero point, which would round it: zero points that clip
            # nothing are exactly as good
            y = exact + zero_point[None, :]
            code = code_of(y, F) - zero_point[None, :]
        error = raised(tl.abs(exact - code), norm, POWER)
        w = 1.0
        if WEIGHTED:
            weight, _ = _members(weights, tile, w_shape, TILE, TILE_COLUMNS)
            w = weight[:, None]
            error = error * w
        total += tl.sum(error, 0).to(tl.float64)
        if CLIPPED:
            under = raised(tl.maximum(F.qmin - y, 0.0), norm, POWER) * w
            over = raised(tl.maximum(y - F.qmax, 0.0), norm, POWER) * w
            below += tl.sum(under, 0).to(tl.float64)
            above += tl.sum(over, 0).to(tl.float64)
    return total, below, above


@triton.jit
def clipped_error(
    values,
    weights,
    shape,
    w_shape,
    scale,
    size,
    unit,
    norm,
    F: tl.constexpr,
    POWER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Return the error of the members that one scale of a symmetric type clips, over size^norm."""
    total = tl.zeros([TILE], tl.float64)
    for tile in range(0, _tiles(shape, TILE, TILE_COLUMNS)):
        x, _ = _members(values, tile, shape, TILE, TILE_COLUMNS)
        x = x * unit
        beyond = tl.maximum(tl.maximum(F.qmin * scale - x, x - F.qmax * scale), 0.0)
        error = raised(tl.div_rn(beyond, size + tl.zeros_like(beyond)), norm, POWER)
        if WEIGHTED:
            w, _ = _members(weights, tile, w_shape, TILE, TILE_COLUMNS)
            error = error * w
        total += error.to(tl.float64)
    return tl.sum(total, 0)


@triton.jit
def fitted_scale(
    values,
    weights,
    shape,
    w_shape,
    scale,
    zero_point,
    unit,
    norm,
    F: tl.constexpr,
    POWER: tl.constexpr,
    WEIGHTED: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Return a better scale for the codes of one: least squares, or a step of Newton's method."""
    pull = tl.zeros([TILE], tl.float64)
    curvature = tl.zeros([TILE], tl.float64)
    for tile in range(0, _tiles(shape, TILE, TILE_COLUMNS)):
        x, there = _members(values, tile, shape, TILE, TILE_COLUMNS)
        y = tl.div_rn(x * unit, scale + tl.zeros_like(x))
        q = code_of(y + zero_point, F) - zero_point
        difference = y - q
        weighed = tl.where(there, q, 0.0)
        if WEIGHTED:
            w, _ = _members(weights, tile, w_shape, TILE, TILE_COLUMNS)
            weighed = weighed * w
        if POWER != 2:
            weighed = weighed * raised(tl.maximum(tl.abs(difference), 1e-3), norm - 2, 0)
        pull += (difference * weighed).to(tl.float64)
        curvature += (q * weighed).to(tl.float64)
    step = tl.sum(pull, 0) / tl.maximum(tl.sum(curvature, 0), 1e-30)
    return (scale.to(tl.float64) * (1 + step / tl.maximum(1.0, norm - 1))).to(tl.float32)
