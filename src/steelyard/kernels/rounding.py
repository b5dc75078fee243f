"""Values as the server reconstructs them: rounded to the quantized type and multiplied back.

compressed-tensors defines this arithmetic; here it runs in fp32 whatever the tensor's type, on
scales that broadcast, and without its compiled fp4 path, so that a search can call it often.
Parity with `fake_quantize` is tested bit for bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["minifloat", "quantized_range", "reconstruct", "round_to_type"]

_MINIFLOATS = {4: (1, 0), 6: (3, 0), 8: (3, -6)}
_RANGES: dict[tuple[str, int], tuple[float, float]] = {}  # cache


def minifloat(num_bits: int) -> tuple[int, int]:
    """Return a small float's mantissa bits and the exponent of its smallest normal number.

    >>> minifloat(4)  # E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6
    (1, 0)
    """
    return _MINIFLOATS[num_bits]


def quantized_range(args: QuantizationArgs) -> tuple[float, float]:
    """Return the smallest and the largest value of the quantized type.

    >>> quantized_range(QuantizationArgs(num_bits=4))
    (-8.0, 7.0)
    """
    key = (str(args.type), args.num_bits)
    if key not in _RANGES:
        from compressed_tensors.quantization.utils import calculate_range

        low, high = calculate_range(args, torch.device("cpu"))
        _RANGES[key] = (float(low), float(high))
    return _RANGES[key]


def round_to_type(scaled: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Round values that lie in the quantized range to the quantized type, ties to even."""
    if args.type == "int":
        return torch.round(scaled)
    if args.num_bits == 8:
        return scaled.to(torch.float8_e4m3fn).to(scaled.dtype)
    # a value with exponent e is a multiple of 2 ** (max(e, min_exponent) - mantissa)
    mantissa, min_exponent = minifloat(args.num_bits)
    exponent = torch.frexp(scaled).exponent - 1
    step = torch.ldexp(torch.ones_like(scaled), exponent.clamp_(min=min_exponent) - mantissa)
    return torch.round(scaled / step) * step


def reconstruct(
    x: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None, args: QuantizationArgs
) -> torch.Tensor:
    """Quantize `x` and multiply it back; no storage in between.

    x:          any shape, fp32 or fp64
    scale:      broadcasts to x, same type; already divided by the global scale if there is one
    zero_point: as scale, or None for a symmetric type
    """
    low, high = quantized_range(args)
    scaled = x / scale
    if zero_point is not None:
        scaled = scaled + zero_point
    quantized = round_to_type(scaled.clamp_(low, high), args)
    if zero_point is not None:
        quantized = quantized - zero_point
    return quantized * scale
