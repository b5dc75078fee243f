"""Computes the stored scale and zero point of a range.

The formula is compressed-tensors' `calculate_qparams`, evaluated in fp32 (fp64 for fp64 tensors).
In addition, the scale is rounded to the type it is stored in, where it stays finite and above zero,
and the zero point is computed for that stored scale, not for the one before rounding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled
from steelyard.kernels.rounding import quantized_range

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["global_scale_of", "is_mx", "nearest_scale", "qparams_from_range", "scale_dtype_of"]

_FLOAT_SCALES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_E8M0_MIN, _E8M0_MAX = 2.0**-127, 2.0**127


def is_mx(args: QuantizationArgs) -> bool:
    """Whether scales are powers of two, stored as an exponent byte."""
    return bool(args.type == "float" and args.scale_dtype == torch.uint8)


def scale_dtype_of(args: QuantizationArgs, observed_dtype: torch.dtype) -> torch.dtype:
    """Return the type in which a scale is stored: the format's own, else the tensor's."""
    return args.scale_dtype if args.scale_dtype is not None else observed_dtype


def global_scale_of(absmax: torch.Tensor) -> torch.Tensor:
    """Return the divisor that maps local scales into E4M3's range, fp32 of shape (1,)."""
    from compressed_tensors.quantization.utils import generate_gparam

    absmax = absmax.clamp(max=torch.finfo(torch.float32).max).float().reshape(1)
    return torch.as_tensor(generate_gparam(-absmax, absmax))


def qparams_from_range(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    global_scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored scale and zero point of each range.

    min_vals, max_vals: (*qparam_shape), fp32 or fp64
    returns: scale (*qparam_shape) in `scale_dtype`, or in fp32 where that type is a one-byte code
             (E4M3, E8M0); zero_point (*qparam_shape) in `args.zp_dtype`
    """
    from compressed_tensors.quantization.utils import calculate_qparams

    single = min_vals.dtype == max_vals.dtype == torch.float32
    if single and use_compiled(min_vals, backend) and compiled.supports(args, scale_dtype):
        return compiled.qparams_from_range(min_vals, max_vals, args, scale_dtype, global_scale)
    low, high = min_vals.clamp(max=0), max_vals.clamp(min=0)
    absmax = torch.maximum(-low, high)
    # max - min of the largest finite values overflows; half of it does not
    half = torch.where(absmax > torch.finfo(absmax.dtype).max / 4, 0.5, 1.0).to(absmax.dtype)
    ideal_args = args if is_mx(args) else args.model_copy(update={"scale_dtype": None})
    ideal, zero_point = calculate_qparams(low * half, high * half, ideal_args, global_scale)
    scale = _store(ideal / half, scale_dtype)
    if not is_mx(args):
        eps = torch.finfo(scale_dtype).eps
        scale = torch.where(absmax.reshape(scale.shape) == 0, torch.full_like(scale, eps), scale)
    if not args.symmetric:
        zero_point = _zero_point(low.reshape(scale.shape), scale, args, global_scale)
    return scale, zero_point


def _store(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Round to `dtype`, finite and above zero; one-byte codes are returned as fp32."""
    if dtype == torch.uint8:
        return scale.clamp(_E8M0_MIN, _E8M0_MAX).to(torch.float32)
    info = torch.finfo(dtype)
    stored = scale.clamp(max=min(info.max, torch.finfo(scale.dtype).max)).to(dtype)
    if dtype not in _FLOAT_SCALES:
        stored = stored.to(torch.float32)
    smallest = info.smallest_normal * info.eps  # the least subnormal
    return torch.where(stored == 0, torch.full_like(stored, smallest), stored)


def nearest_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest scale that `dtype` stores; typed as by `qparams_from_range`.

    >>> nearest_scale(torch.tensor([0.7, 0.8]), torch.uint8)  # powers of two
    tensor([0.5000, 1.0000])
    """
    if dtype == torch.uint8:
        mantissa, exponent = torch.frexp(scale)  # mantissa in [0.5, 1)
        power = torch.where(mantissa < 0.75, exponent - 1, exponent)
        scale = torch.ldexp(torch.ones_like(scale), power)
    return _store(scale, dtype)


def _zero_point(
    low: torch.Tensor,
    scale: torch.Tensor,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
) -> torch.Tensor:
    from compressed_tensors.quantization.quant_args import round_to_quantized_type_dtype

    qmin, qmax = quantized_range(args)
    effective = scale.to(low.dtype) if global_scale is None else scale.to(low.dtype) / global_scale
    zero_point = (qmin - low / effective).clamp(qmin, qmax)
    return torch.as_tensor(
        round_to_quantized_type_dtype(zero_point, dtype=args.zp_dtype, cast_to_original_dtype=False)
    )
