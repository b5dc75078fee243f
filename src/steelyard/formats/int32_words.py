"""Integers of 2 to 8 bits in words of 32: `pack-quantized`.

    weight_packed      I32 [out, in * bits / 32]
    weight_shape       I64 [2]
    weight_zero_point  I32 [out * bits / 32, in / g], where the type is asymmetric

Codes are packed along the input, low bits first, and count from the smallest; zero points are
packed along the output.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.stored_format import StoredFormat, Tensors, TensorSpec
from steelyard.formats.tensor_names import PACKED, SCALE, SHAPE, ZERO_POINT
from steelyard.kernels.pack import quantize_and_pack
from steelyard.kernels.rounding import quantized_range
from steelyard.kernels.scale_blocks import scale_shape

__all__ = ["Int32Words", "words_for"]

_WORD = 32  # bits


@lru_cache(maxsize=256)
def words_for(count: int, num_bits: int) -> int:
    """Return how many int32 hold `count` values.

    compressed-tensors decides: up to 0.17 a value of 3, 5, 6 or 7 bits never straddles two words,
    from 0.20 on it does.
    """
    period = _WORD * (_WORD // num_bits)  # values after which either way begins a new word
    if count > period:
        return count // period * words_for(period, num_bits) + words_for(count % period, num_bits)
    return int(pack_to_int32(torch.zeros(1, count, dtype=torch.int8), num_bits).shape[1])


@dataclass(frozen=True)
class Int32Words(StoredFormat):
    """Weight of several integers per word."""

    codes: str = PACKED

    def code_tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        stored: dict[str, TensorSpec] = {
            self.codes: (torch.int32, (rows, words_for(columns, args.num_bits))),
            SHAPE: (torch.int64, (2,)),
        }
        if _packs_zero_point(args):
            groups = scale_shape(args, shape)[1]
            stored[ZERO_POINT] = (torch.int32, (words_for(rows, args.num_bits), groups))
        return stored

    def problem(self, args: QuantizationArgs, shape: tuple[int, int]) -> str | None:
        if not _packs_zero_point(args) or shape[0] > _WORD // args.num_bits:
            return None
        return (
            f"zero points of {shape[0]} rows are packed in one word, which compressed-tensors does "
            "not unpack; ignore it, or use a symmetric scheme"
        )

    def packs_type(self, args: QuantizationArgs) -> bool:
        return bool(args.type == "int" and args.num_bits <= 8)

    def pack(
        self,
        weight: torch.Tensor,
        qparams: Tensors,
        args: QuantizationArgs,
        errors: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        scale, zero_point = qparams[SCALE], qparams.get(ZERO_POINT)
        straddles = words_for(_WORD, args.num_bits) == args.num_bits  # as the kernel packs
        codes = quantize_and_pack(weight, scale, zero_point, args, packed=straddles, errors=errors)
        if not straddles:
            codes = pack_to_int32(codes, args.num_bits)
        stored = {SCALE: scale, self.codes: codes, SHAPE: torch.tensor(weight.shape)}
        if zero_point is not None and _packs_zero_point(args):
            packed = pack_to_int32(zero_point, args.num_bits, packed_dim=0)
            stored[ZERO_POINT] = packed.contiguous()
        return stored

    def rows_of(
        self,
        local: str,
        spec: TensorSpec,
        shape: tuple[int, int],
        args: QuantizationArgs,
        rows: tuple[int, int],
    ) -> tuple[int, int] | None:
        if local == ZERO_POINT and spec[0] == torch.int32:
            return words_for(rows[0], args.num_bits), words_for(rows[1], args.num_bits)
        return super().rows_of(local, spec, shape, args, rows)

    def row_unit(self, args: QuantizationArgs) -> int:
        return math.lcm(super().row_unit(args), _WORD // args.num_bits)

    def filled(
        self, codes: torch.Tensor, args: QuantizationArgs, code: float
    ) -> torch.Tensor | None:
        return torch.full_like(codes, 0 if code == quantized_range(args)[0] else -1)


def _packs_zero_point(args: QuantizationArgs) -> bool:
    return not args.symmetric and args.strategy in ("group", "channel")
