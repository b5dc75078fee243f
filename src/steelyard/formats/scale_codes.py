"""Scales as they are stored: floats, or one byte with the exponent of a power of two (E8M0)."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs

__all__ = ["float_scale_dtype", "is_exponents", "stored_scale_values"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_BIAS, _NAN = 127, 255


def float_scale_dtype(args: QuantizationArgs, dtype: torch.dtype) -> torch.dtype:
    """Return the type of a scale that a format stores as a float.

    dtype: of the tensor that the scale belongs to
    """
    stored = args.scale_dtype or dtype
    return stored if stored in _FLOATS else torch.float32  # codes are stored as their value


def is_exponents(dtype: torch.dtype) -> bool:
    """Whether scales of this type are exponents."""
    return dtype == torch.uint8


def stored_scale_values(stored: torch.Tensor) -> torch.Tensor:
    """Return the values of stored scales, fp64; the largest exponent is NaN."""
    if not is_exponents(stored.dtype):
        return stored.double()
    values = torch.exp2(stored.double() - _BIAS)
    return torch.where(stored == _NAN, torch.nan, values)
