"""Quantize a weight straight into the layout that the file holds.

The bytes are those of compressed-tensors' own compressors. These divide in the weight's type: a
bf16 weight over a bf16 scale is rounded to bf16 before it is rounded to a code, which misplaces
values near the midpoint of two codes. `exact=True` divides in fp32 instead, which never
makes a code worse.

=====================  =====================================  ==============================
format                 stored                                  shape for a weight (out, in)
=====================  =====================================  ==============================
pack-quantized         ints of 2 to 8 bits, offset, dense      int32 (out, ceil(in * bits / 32))
int-quantized          int8                                    int8 (out, in)
float-quantized, MXFP8 E4M3                                    float8_e4m3fn (out, in)
NVFP4, MXFP4           E2M1, the even column in the low half   uint8 (out, in / 2)
=====================  =====================================  ==============================
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled, use_triton
from steelyard.kernels.rounding import quantized_range, round_to_type
from steelyard.kernels.scale_blocks import block_of, blocks_in, divides

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = [
    "E2M1",
    "quantize_and_pack",
    "quotient_dtype",
    "squared_error",
    "stored_values",
]

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_PACKED32, _BYTES, _NIBBLES = 0, 1, 2  # as in native/api.h


def quantize_and_pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    packed: bool = True,
    exact: bool = False,
    backend: str | None = None,
    errors: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the stored form of a weight.

    weight:     (out, in), fp32, fp16 or bf16
    scale:      as `Observer.get_qparams` returns it
    zero_point: likewise; one of zeros, where the type is symmetric, only turns -0.0 into 0.0
    packed:     integers into int32 words; False stores one int8 each
    errors:     (out,), fp64; filled with the squared error of each row, at little cost
    """
    zero_point, block, rounds = _arithmetic(weight, scale, zero_point, args, global_scale, exact)
    layout, shape, dtype = _storage(args, weight.shape[0], weight.shape[1], packed)
    fast_pack = _fast_pack(weight, scale, global_scale, rounds, backend)
    if fast_pack is not None:
        out = torch.empty(shape, dtype=dtype, device=weight.device)
        raw = out.view(torch.uint8)
        fast_pack(weight, scale, zero_point, args, global_scale, block, layout, rounds, raw, errors)
        return out
    codes = _quantize(weight, scale, zero_point, args, global_scale, block, rounds)
    if errors is not None:
        errors.copy_(_row_errors(weight, codes, scale, zero_point, global_scale, block))
    if layout == _BYTES:
        return codes.to(dtype)
    if layout == _NIBBLES:
        return _pack_nibbles(codes)
    return _pack_words(codes.to(torch.int32), args.num_bits)


def squared_error(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    exact: bool = False,
    backend: str | None = None,
) -> float:
    """Return the summed squared difference between a weight and its stored form, in fp32.

    Arguments are those of `quantize_and_pack`.
    """
    zero_point, block, rounds = _arithmetic(weight, scale, zero_point, args, global_scale, exact)
    fast_pack = _fast_pack(weight, scale, global_scale, rounds, backend)
    if fast_pack is not None:
        errors = torch.empty(len(weight), dtype=torch.float64)
        fast_pack(
            weight, scale, zero_point, args, global_scale, block, _BYTES, rounds, errors=errors
        )
        return float(errors.sum())
    codes = _quantize(weight, scale, zero_point, args, global_scale, block, rounds)
    return float(_row_errors(weight, codes, scale, zero_point, global_scale, block).sum())


def stored_values(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the values that the stored form of some weights decodes to, fp32.

    weight: (n, width); each row has one scale and one zero point, (n, 1)
    """
    zero_point, _, rounds = _arithmetic(weight, scale, zero_point, args, global_scale, False)
    block = (1, weight.shape[1])
    codes = _quantize(weight, scale, zero_point, args, global_scale, block, rounds)
    return _decoded(codes, scale, zero_point, global_scale, block)


def _row_errors(
    weight: torch.Tensor,
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    block: tuple[int, int],
) -> torch.Tensor:
    """Return the squared error of each row, fp64 of shape (out,)."""
    stored = _decoded(codes, scale, zero_point, global_scale, block)
    return (stored - weight.float()).double().square().sum(dim=1)


def _decoded(
    codes: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    global_scale: torch.Tensor | None,
    block: tuple[int, int],
) -> torch.Tensor:
    """Return the values of codes, fp32."""
    if zero_point is not None:
        codes = codes - _spread(zero_point.float(), codes.shape, block)
    effective = scale.float() if global_scale is None else scale.float() / global_scale
    return codes * _spread(effective, codes.shape, block)


def _arithmetic(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
    exact: bool,
) -> tuple[torch.Tensor | None, tuple[int, int], bool]:
    """Return the zero point, the block that shares a scale, and whether quotients are rounded."""
    if weight.ndim != 2:
        raise StrategyError(f"a weight to pack has two dimensions, got {tuple(weight.shape)}")
    if args.type == "float" and args.num_bits == 4:
        zero_point = torch.zeros_like(scale)  # fp4 has none, but its zeros lose their sign
    rounds = not exact and quotient_dtype(weight, scale, global_scale) in (
        torch.bfloat16,
        torch.float16,
    )
    return zero_point, block_of(args, weight.shape[0], weight.shape[1]), rounds


def quotient_dtype(
    weight: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor | None
) -> torch.dtype:
    """Return the dtype in which torch divides these tensors."""
    return torch.result_type(weight, scale) if global_scale is None else torch.float32


def _fast_pack(
    weight: torch.Tensor,
    scale: torch.Tensor,
    global_scale: torch.Tensor | None,
    rounds: bool,
    backend: str | None,
) -> Callable[..., None] | None:
    """Return the kernel that runs instead of the reference, if there is one."""
    if rounds and quotient_dtype(weight, scale, global_scale) != weight.dtype:
        return None
    if use_compiled(weight, backend):
        return compiled.pack
    if use_triton(weight, backend):
        from steelyard.kernels import triton_pack

        return triton_pack.pack
    return None


def _storage(
    args: QuantizationArgs, rows: int, columns: int, packed: bool
) -> tuple[int, tuple[int, int], torch.dtype]:
    if args.type == "float" and args.num_bits == 8:
        return _BYTES, (rows, columns), torch.float8_e4m3fn
    if args.type == "float" and args.num_bits == 4:
        if not divides(2, columns):
            raise StrategyError(f"fp4 stores two columns to a byte, and {columns} is odd")
        return _NIBBLES, (rows, columns // 2), torch.uint8
    if args.type == "int" and packed:
        return _PACKED32, (rows, math.ceil(columns * args.num_bits / 32)), torch.int32
    if args.type == "int":
        return _BYTES, (rows, columns), torch.int8
    raise StrategyError(f"cannot store {args.num_bits}-bit floats: use 4 or 8 bits")


def _quantize(
    weight: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None,
    block: tuple[int, int],
    rounds: bool,
) -> torch.Tensor:
    """Return codes as floats, (out, in)."""
    dtype = weight.dtype if rounds else torch.float32
    effective = scale.to(dtype) if global_scale is None else scale.float() / global_scale
    scaled = weight.to(dtype) / _spread(effective, weight.shape, block)
    if zero_point is not None:
        scaled = scaled + _spread(zero_point.to(dtype), weight.shape, block)
    low, high = quantized_range(args)
    rounded = round_to_type(scaled.clamp(low, high).float(), args)
    return torch.copysign(rounded, scaled.float()) if args.type == "float" else rounded


def _spread(t: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Return one value per weight."""
    rows, columns = shape
    grid = t.reshape(blocks_in(rows, block[0]), blocks_in(columns, block[1]))
    wide = grid.repeat_interleave(block[0], 0)[:rows]
    return wide.repeat_interleave(block[1], 1)[:, :columns]


def _pack_nibbles(codes: torch.Tensor) -> torch.Tensor:
    values = torch.tensor(E2M1, device=codes.device)
    index = torch.searchsorted(values, codes.abs()).to(torch.uint8)
    index = index | (torch.signbit(codes).to(torch.uint8) << 3)
    return index[:, ::2] | (index[:, 1::2] << 4)


def _pack_words(codes: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Pack values of `num_bits` bits densely, low first, into int32 words."""
    rows, columns = codes.shape
    words = math.ceil(columns * num_bits / 32)
    unsigned = codes + (1 << (num_bits - 1))
    bits = (unsigned.unsqueeze(-1) >> torch.arange(num_bits, device=codes.device)) & 1
    flat = torch.nn.functional.pad(bits.reshape(rows, -1), (0, words * 32 - columns * num_bits))
    places = torch.arange(32, device=codes.device, dtype=torch.int64)
    total = (flat.reshape(rows, words, 32).to(torch.int64) << places).sum(-1)
    return total.to(torch.int32)  # wraps: the top bit is the sign
