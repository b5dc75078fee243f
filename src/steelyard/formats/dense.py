"""A weight in its original type: `dense`, the format of unquantized modules."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.stored_format import StoredFormat, TensorSpec

__all__ = ["Dense"]


class Dense(StoredFormat):
    """Weight without codes."""

    def code_tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        return {self.codes: (dtype, shape)}
