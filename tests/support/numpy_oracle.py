"""Quantization written a second time, in NumPy, from the definition of the formats.

Nothing here calls torch's arithmetic, compressed-tensors or steelyard. Types are lists of their
values, rounding looks for the nearest of them, bf16 is rounded on its bits, and a search tries
every candidate. Scales are computed in fp32, as the package promises; errors in fp64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)]
    + [(1 + m / 8) * 2.0 ** (e - 7) for e in range(1, 16) for m in range(8)][:-1]  # the last: NaN
)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E2M3 = np.array([m / 8 for m in range(16)] + [2 + m / 4 for m in range(8)])
E2M3 = np.concatenate([E2M3, [4 + m / 2 for m in range(8)]])
"""Values that are not negative, in the order of their codes."""

_FLOAT_CODES = {4: E2M1, 6: E2M3, 8: E4M3}


def nearest_code(x: Any, codes: np.ndarray) -> np.ndarray:
    """Round magnitudes to the nearest code, ties to the even one; saturate."""
    x = np.asarray(x, dtype=np.float64)
    middles = (codes[1:] + codes[:-1]) / 2
    index = np.searchsorted(middles, np.abs(x), side="left")  # a tie goes down
    tie = np.isin(np.abs(x), middles)
    index = index + (tie & (index % 2 == 1))
    return np.copysign(codes[index], x)


def limits(args: Any) -> tuple[float, float]:
    if args.type == "float":
        return -_FLOAT_CODES[args.num_bits][-1], _FLOAT_CODES[args.num_bits][-1]
    half = 2.0 ** (args.num_bits - 1)
    return -half, half - 1


def round_to_type(x: np.ndarray, args: Any) -> np.ndarray:
    low, high = limits(args)
    clipped = np.clip(x, low, high)
    if args.type == "float":
        return nearest_code(clipped, _FLOAT_CODES[args.num_bits])
    return np.rint(clipped)


def reconstruct(x: Any, scale: Any, zero_point: Any, args: Any) -> np.ndarray:
    """Quantize and multiply back in fp64; everything broadcasts."""
    x, scale, zero_point = (np.asarray(v, dtype=np.float64) for v in (x, scale, zero_point))
    return (round_to_type(x / scale + zero_point, args) - zero_point) * scale


def to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round fp32 to 8 significant bits on its bit pattern, ties to even; finite values only."""
    bits = np.asarray(x, dtype=np.float32).view(np.uint32).astype(np.uint64)
    odd = (bits >> 16) & 1
    bits = (bits + 0x7FFF + odd) & 0xFFFF0000
    return bits.astype(np.uint32).view(np.float32)


def store(scale: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Round an fp32 scale to its stored type, between the least and the largest positive value."""
    scale = np.asarray(scale, dtype=np.float32)
    if dtype == torch.float32:
        return np.clip(scale, np.float32(2**-149), np.finfo(np.float32).max)
    if dtype == torch.bfloat16:
        top = np.uint32(0x7F7F0000).view(np.float32)
        return np.clip(to_bfloat16(np.minimum(scale, top)), np.float32(2**-133), top)
    if dtype == torch.float16:
        top = np.float32(65504)
        stored = np.minimum(scale, top).astype(np.float16).astype(np.float32)
        return np.clip(stored, np.float32(2**-24), top)
    assert dtype == torch.float8_e4m3fn
    return np.maximum(nearest_code(scale, E4M3), E4M3[1]).astype(np.float32)


def eps(dtype: torch.dtype) -> float:
    """Return the step above 1: the scale of a range that is all zero."""
    return {torch.float8_e4m3fn: 2.0**-3, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}.get(
        dtype, 2.0**-23
    )


def mx_scale(absmax: np.ndarray, num_bits: int) -> np.ndarray:
    """Return powers of two: a magnitude of 1.75 * 2^e or more counts as 2^(e + 1)."""
    emax = {4: 2, 8: 8}[num_bits]
    scales = []
    for magnitude in np.asarray(absmax, dtype=np.float64).ravel():
        exponent = -math.inf
        if magnitude > 0:
            mantissa, e = math.frexp(magnitude)
            exponent = e - 1 + (2 * mantissa >= 1.75)
        scales.append(2.0 ** min(max(exponent - emax, -127), 127))
    return np.array(scales, dtype=np.float64).reshape(np.shape(absmax))


def qparams(
    low: Any, high: Any, args: Any, scale_dtype: torch.dtype, global_scale: float | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return stored scale and zero point of ranges, as fp64 numbers.

    Where the width of a range overflows fp32, half of it is used instead.
    """
    low = np.minimum(np.asarray(low, dtype=np.float32), 0)
    high = np.maximum(np.asarray(high, dtype=np.float32), 0)
    absmax = np.maximum(-low, high)
    if scale_dtype == torch.uint8:
        scale = mx_scale(absmax, args.num_bits)
        return scale, np.zeros_like(scale)
    qmin, qmax = limits(args)
    with np.errstate(over="ignore"):
        if args.symmetric:
            ideal = absmax / np.float32((qmax - qmin) / 2)
        else:
            steps = np.float32(qmax - qmin)
            ideal = (high - low) / steps
            wide = ~np.isfinite(ideal)
            ideal = np.where(wide, (high / 2 - low / 2) / steps * np.float32(2), ideal)
        if global_scale is not None:
            ideal = np.float32(global_scale) * ideal
    stored = store(ideal, scale_dtype)
    stored = np.where(absmax == 0, np.float32(eps(scale_dtype)), stored).astype(np.float32)
    if args.symmetric:
        return stored.astype(np.float64), np.zeros(stored.shape)
    effective = stored if global_scale is None else stored / np.float32(global_scale)
    zero_point = round_to_type(np.float32(qmin) - low / effective, args)
    return stored.astype(np.float64), zero_point


def effective_scale(scale: Any, global_scale: float | None) -> np.ndarray:
    """Return what a value is divided by: fp32, as the server computes it."""
    scale = np.asarray(scale, dtype=np.float32)
    return scale if global_scale is None else scale / np.float32(global_scale)


def error_of(
    x: np.ndarray, scale: Any, zero_point: Any, args: Any, norm: float, importance: Any = 1.0
) -> np.ndarray:
    """Return the objective of each group: (num_observations, *qparam_shape, g) -> (*qparam_shape).

    Magnitudes are divided by the group's largest, which is how the objective is defined.
    """
    x = np.asarray(x, dtype=np.float64)
    absmax = np.abs(x).max(axis=(0, -1), keepdims=True)
    absmax = np.where(absmax == 0, 1, absmax)
    scale, zero_point = (np.asarray(v, np.float64)[None, ..., None] for v in (scale, zero_point))
    difference = np.abs(reconstruct(x, scale, zero_point, args) - x) / absmax
    return (np.asarray(importance) * difference**norm).sum(axis=(0, -1))


def brute_force(
    x: np.ndarray,
    args: Any,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    norm: float,
    importance: Any = 1.0,
    global_scale: float | None = None,
) -> np.ndarray:
    """Return the error of every candidate range: (len(factors), *qparam_shape)."""
    low = x.min(axis=(0, -1)).astype(np.float32)
    high = x.max(axis=(0, -1)).astype(np.float32)
    errors = []
    for p in factors:
        scale, zero_point = qparams(
            low * np.float32(p), high * np.float32(p), args, scale_dtype, global_scale
        )
        scale = effective_scale(scale, global_scale)
        errors.append(error_of(x, scale, zero_point, args, norm, importance))
    return np.stack(errors)
