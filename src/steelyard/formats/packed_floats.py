"""Floats of 4 and 6 bits, several per byte, with scales of one byte.

    nvfp4-pack-quantized    weight_packed U8 [out, in / 2], weight_scale F8_E4M3 [out, in / 16],
                            weight_global_scale F32 [1]
    mxfp4-pack-quantized    weight_packed U8 [out, in / 2], weight_scale U8 [out, in / 32]
    mxfp6-pack-quantized    weight_packed U8 [out, in * 3 / 4], weight_scale U8 [out, in / 32]

The even column is in the low half of a byte. The global scale is a divisor, a U8 scale an exponent.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.stored_format import StoredFormat, Tensors, TensorSpec
from steelyard.formats.tensor_names import GLOBAL_SCALE, PACKED, SCALE, ZERO_POINT
from steelyard.kernels.pack import quantize_and_pack

__all__ = ["PackedFloats"]

_PAIRS = {0.0: 0x00, 1.0: 0x22}  # value -> a byte of two E2M1 codes


@dataclass(frozen=True)
class PackedFloats(StoredFormat):
    """Weight of small floats.

    num_bits: of a code
    """

    codes: str = PACKED
    num_bits: int = 4

    def code_tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        rows, columns = shape
        return {self.codes: (torch.uint8, (rows, columns * self.num_bits // 8))}

    def packs_type(self, args: QuantizationArgs) -> bool:
        return args.type == "float" and args.num_bits == 4 and bool(args.symmetric)

    def pack(
        self,
        weight: torch.Tensor,
        qparams: Tensors,
        args: QuantizationArgs,
        errors: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        scale, zero_point = qparams[SCALE], qparams.get(ZERO_POINT)
        global_scale = qparams.get(GLOBAL_SCALE)
        codes = quantize_and_pack(weight, scale, zero_point, args, global_scale, errors=errors)
        return {SCALE: self.stored_scale(scale, args), self.codes: codes}

    def filled(
        self, codes: torch.Tensor, args: QuantizationArgs, code: float
    ) -> torch.Tensor | None:
        return torch.full_like(codes, _PAIRS[code]) if self.num_bits == 4 else None
