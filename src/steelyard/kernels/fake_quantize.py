"""Fake quantization with gradients: values as the server decodes them, differentiable.

    code  = round(clip(weight / s + zero_point + offset * step))
    value = (code - zero_point) * s,    s = stored(scale) / global_scale

`step` is the distance between two codes: 1 for integers, 2^(exponent - mantissa) for small floats.
An offset of half a step so moves any value to the code beside it. Rounding, of codes and of scales
to the type that they are stored in, counts as the identity in the gradient (straight-through); a
value outside of the range that codes cover has none.

The results are those of `Grid.stored` bit for bit, before they are rounded to the weight's type.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.qparams import nearest_scale
from steelyard.kernels.rounding import minifloat, quantized_range, round_to_type
from steelyard.kernels.scale_blocks import block_of

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["code_step", "dequantize", "fake_quantize", "spread", "stored_scale"]


def fake_quantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the values that a weight is stored as; (out, in), in the type of `weight`.

    Differentiable in weight, scale and offset.

    weight:       (out, in), fp32 or fp64
    scale:        any shape with one element per block of `scale_blocks.block_of`, in row order, as
                  `Observer.get_qparams` returns it: (1,), (out, 1) or (out, in / g); in the type of
                  `weight`; may be negative
    zero_point:   as scale, any type; None where the type is symmetric
    global_scale: (1,), divides the scale; None if there is none
    offset:       (out, in), in steps from one code to the next; None for 0
    scale_dtype:  the type that scales are stored in, which they are rounded to; None if `scale`
                  holds stored values already
    """
    shape = weight.shape[0], weight.shape[1]
    wide = spread(_as_read(scale, global_scale, scale_dtype), args, shape)
    zeros = None if zero_point is None else spread(zero_point.to(wide.dtype), args, shape)
    places = weight / wide
    if zeros is not None:
        places = places + zeros
    if offset is not None:
        places = places + offset * code_step(places.detach(), args)
    places = places.clamp(*quantized_range(args))
    codes = _straight_through(places, round_to_type(places.detach(), args))
    if zeros is not None:
        codes = codes - zeros
    return codes * wide


def dequantize(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    scale_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return the values of codes, (out, in); differentiable in the scale. As `fake_quantize`.

    codes: (out, in), fp32 or fp64, such as -8 to 7 for int4 and -6 to 6 for E2M1
    """
    shape = codes.shape[0], codes.shape[1]
    if zero_point is not None:
        codes = codes - spread(zero_point.to(codes.dtype), args, shape)
    return codes * spread(_as_read(scale, global_scale, scale_dtype), args, shape)


def stored_scale(scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the nearest scales that `dtype` stores, with the sign of `scale` and in its type.

    The gradient is that of the identity.
    """
    size = nearest_scale(scale.detach().abs(), dtype).to(scale.dtype)
    return _straight_through(scale, size.copysign(scale.detach()))


def code_step(places: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
    """Return the distance between the codes around each place, as a tensor that broadcasts.

    >>> code_step(torch.tensor([0.2, 1.2, 5.0]), QuantizationArgs(num_bits=4, type="float"))
    tensor([0.5000, 0.5000, 2.0000])
    """
    if args.type == "int":
        return torch.ones((), dtype=places.dtype, device=places.device)
    mantissa, min_exponent = minifloat(args.num_bits)
    inside = places.clamp(*quantized_range(args))
    exponent = torch.frexp(inside).exponent - 1
    return torch.ldexp(torch.ones_like(places), exponent.clamp_(min=min_exponent) - mantissa)


def spread(values: torch.Tensor, args: QuantizationArgs, shape: tuple[int, int]) -> torch.Tensor:
    """Return one value per weight, (out, in), of one per block."""
    rows, columns = shape
    height, width = block_of(args, rows, columns)
    blocks = values.reshape(-(-rows // height), -(-columns // width))
    wide = blocks.repeat_interleave(height, 0)[:rows] if height > 1 else blocks
    return wide.repeat_interleave(width, 1)[:, :columns]


def _as_read(
    scale: torch.Tensor, global_scale: torch.Tensor | None, dtype: torch.dtype | None
) -> torch.Tensor:
    stored = scale if dtype is None else stored_scale(scale, dtype)
    return stored if global_scale is None else stored / global_scale


def _straight_through(x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
    """Return `rounded`, with the gradient of `x`."""
    return _Rounded.apply(x, rounded)  # type: ignore[no-any-return, no-untyped-call]


class _Rounded(torch.autograd.Function):
    """x + (rounded - x) would round once more."""

    @staticmethod
    def forward(context: object, x: torch.Tensor, rounded: torch.Tensor) -> torch.Tensor:
        return rounded.view_as(rounded)

    @staticmethod
    def backward(context: object, *gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient[0], None
