"""One code per byte, in a tensor that keeps the weight's name and shape.

    int-quantized      weight I8 [out, in]
    float-quantized    weight F8_E4M3 [out, in]
    naive-quantized    either of the two
    mxfp8-quantized    weight F8_E4M3 [out, in], exponents as scales

A weight is (code - zero point) * scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.stored_format import StoredFormat, Tensors, TensorSpec
from steelyard.formats.tensor_names import SCALE, ZERO_POINT
from steelyard.kernels.pack import quantize_and_pack

__all__ = ["CodeBytes"]


@dataclass(frozen=True)
class CodeBytes(StoredFormat):
    """Weight of one code per byte.

    integers: whether codes may be integers; else they are floats
    """

    integers: bool = True

    def code_tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        return {self.codes: (args.pytorch_dtype(), shape)}

    def packs_type(self, args: QuantizationArgs) -> bool:
        if args.type == "int":
            return self.integers and bool(args.num_bits <= 8)
        return bool(args.num_bits == 8)

    def pack(
        self,
        weight: torch.Tensor,
        qparams: Tensors,
        args: QuantizationArgs,
        errors: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        scale, zero_point = qparams[SCALE], qparams.get(ZERO_POINT)
        # compressed-tensors ignores a global scale here too
        codes = quantize_and_pack(weight, scale, zero_point, args, packed=False, errors=errors)
        return {SCALE: self.stored_scale(scale, args), self.codes: codes}

    def filled(
        self, codes: torch.Tensor, args: QuantizationArgs, code: float
    ) -> torch.Tensor | None:
        return torch.full(codes.shape, code).to(codes.dtype)
