"""NVFP4 as quantization arguments: groups of E2M1 values with an E4M3 scale each."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs


def nvfp4(group_size: int = 16) -> QuantizationArgs:
    return QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=group_size,
        scale_dtype=torch.float8_e4m3fn,
        zp_dtype=torch.float8_e4m3fn,
    )
