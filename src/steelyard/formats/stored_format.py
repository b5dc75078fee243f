"""How a quantized weight is stored: one descriptor for each format of compressed-tensors.

Plan, writer, decoder, validator and report get names, types, shapes, bytes and words from it; they
never compare names of formats or tensors. compressed-tensors defines the layouts. Its compressors
pack types that our kernel does not cover, and decode everything, as a server's loader does.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.compressors.mx_utils import compress_mx_scale
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

from steelyard.errors import StrategyError
from steelyard.formats.scale_codes import float_scale_dtype, is_exponents
from steelyard.formats.tensor_names import (
    GLOBAL_SCALE,
    GROUP_INDEX,
    SCALE,
    WEIGHT,
    ZERO_POINT,
)
from steelyard.kernels.rounding import quantized_range
from steelyard.kernels.scale_blocks import blocks_in, scale_shape

__all__ = ["CodeGrid", "StoredFormat", "TensorSpec", "Tensors"]

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
Tensors = Mapping[str, torch.Tensor]

_AT_ONCE = 32  # rows that are read together, at least
_KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class CodeGrid(NamedTuple):
    """Values of the codes of some rows: `offset + code * step`, each (rows, columns)."""

    offset: torch.Tensor
    step: torch.Tensor


@dataclass(frozen=True)
class StoredFormat(ABC):
    """A stored format.

    name:        as in config.json
    description: in words
    codes:       local name of the tensor that holds the codes
    scale_dtype: type of the scales, unless the scheme names one; None for that of the weight
    """

    name: str
    description: str
    codes: str = WEIGHT
    scale_dtype: torch.dtype | None = None

    @property
    def compressor(self) -> Any:
        """compressed-tensors' compressor, a class with `compress` and `decompress`."""
        return BaseCompressor.get_value_from_registry(self.name)

    @property
    def is_packed(self) -> bool:
        """Whether several codes share a byte or word, so that there is no tensor `weight`."""
        return self.codes != WEIGHT

    # -- names, types and shapes --------------------------------------------------------------

    def tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Return type and shape of each stored tensor of a weight.

        shape, dtype: (out, in) and type of the weight before it was quantized
        """
        parameters = scale_shape(args, shape)
        stored: dict[str, TensorSpec] = {SCALE: (self.scale_type(args, dtype), parameters)}
        if args.strategy == "tensor_group":
            stored[GLOBAL_SCALE] = (torch.float32, (1,))
        if not args.symmetric:
            stored[ZERO_POINT] = (args.zp_dtype, parameters)
        if args.actorder == "group":
            stored[GROUP_INDEX] = (torch.int32, (shape[1],))
        return {**stored, **self.code_tensors(args, shape, dtype)}

    @abstractmethod
    def code_tensors(
        self, args: QuantizationArgs, shape: tuple[int, int], dtype: torch.dtype
    ) -> dict[str, TensorSpec]:
        """Return type and shape of the codes, and of tensors that this format adds or replaces."""

    def scale_type(self, args: QuantizationArgs, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a weight's scale, given the type of the weight."""
        if self.scale_dtype is not None:
            return args.scale_dtype or self.scale_dtype
        return float_scale_dtype(args, dtype)

    def problem(self, args: QuantizationArgs, shape: tuple[int, int]) -> str | None:
        """Return why a weight of this shape cannot be read back; None if it can."""
        return None

    def stores(self, local: str, scheme: QuantizationScheme) -> bool:
        """Whether the installed compressed-tensors stores a parameter of a weight."""
        return local in self.compressor.compression_param_names(scheme)

    # -- packing ------------------------------------------------------------------------------

    def packs(self, weight: torch.Tensor, args: QuantizationArgs | None) -> bool:
        """Whether our kernel writes the compressor's bytes for a weight."""
        plain = weight.ndim == 2 and weight.dtype in _KERNEL_DTYPES
        return args is not None and plain and self.packs_type(args)

    def packs_type(self, args: QuantizationArgs) -> bool:
        """Whether our kernel writes codes of this type."""
        return False

    def pack(
        self,
        weight: torch.Tensor,
        qparams: Tensors,
        args: QuantizationArgs,
        errors: torch.Tensor | None,
    ) -> dict[str, torch.Tensor]:
        """Return the tensors that are not stored unchanged; called where `packs` is true.

        The arguments are those of `stored_tensors`.
        """
        raise StrategyError(f"no kernel packs the format {self.name}")

    def stored_scale(self, scale: torch.Tensor, args: QuantizationArgs) -> torch.Tensor:
        """Return a weight's scale in the type of the file."""
        if self.scale_dtype is None:
            return scale
        dtype = self.scale_type(args, scale.dtype)
        if is_exponents(self.scale_dtype):
            return torch.as_tensor(compress_mx_scale(scale, dtype))
        return scale.to(dtype)

    # -- decoding -----------------------------------------------------------------------------

    def rows_of(
        self,
        local: str,
        spec: TensorSpec,
        shape: tuple[int, int],
        args: QuantizationArgs,
        rows: tuple[int, int],
    ) -> tuple[int, int] | None:
        """Return the rows of a stored tensor that belong to some rows of the weight; None for all.

        spec:  type and shape of the stored tensor
        shape: (out, in) of the weight
        rows:  first and last + 1 of the weight, the first a multiple of `row_unit`
        """
        stored = spec[1]
        if len(stored) != 2:
            return None
        height = _height(args) if stored[0] < shape[0] else 1
        return rows[0] // height, blocks_in(rows[1], height)

    def row_unit(self, args: QuantizationArgs) -> int:
        """Return the number of rows whose multiples split no block and no word of codes."""
        return math.lcm(_AT_ONCE, _height(args))

    def decode(self, stored: Tensors, scheme: QuantizationScheme) -> torch.Tensor:
        """Return the weight, fp32, as the compressor decodes it.

        Float scales are cast to fp32 first: else the product is rounded to bf16, too coarse for 8
        bits.
        """
        scale = stored.get(SCALE)
        if scale is not None and scale.dtype.itemsize > 1:
            stored = {**stored, SCALE: scale.float()}
        return torch.as_tensor(self.compressor.decompress(dict(stored), scheme)["weight"]).float()

    def grid(self, stored: Tensors, scheme: QuantizationScheme) -> CodeGrid | None:
        """Return the values of the codes of some rows; None where they are unknown.

        It decodes equal codes with the stored scales.
        """
        args = scheme.weights
        assert args is not None
        low, high = (0.0, 1.0) if args.type == "float" else quantized_range(args)
        codes = stored[self.codes]
        smallest, largest = self.filled(codes, args, low), self.filled(codes, args, high)
        if smallest is None or largest is None:
            return None
        at_high = self.decode({**stored, self.codes: largest}, scheme)
        if args.type == "float" and args.symmetric:  # where the code 0 is 0
            return CodeGrid(torch.zeros((), dtype=at_high.dtype), at_high)
        at_low = self.decode({**stored, self.codes: smallest}, scheme)
        step = (at_high - at_low) / (high - low)
        return CodeGrid(at_low - low * step, step)

    def filled(
        self, codes: torch.Tensor, args: QuantizationArgs, code: float
    ) -> torch.Tensor | None:
        """Return a tensor like `codes` with one code everywhere; None if the format has none.

        code: either end of an integer type; 0 or 1 for floats
        """
        return None


def _height(args: QuantizationArgs) -> int:
    return int(args.block_structure[0]) if args.block_structure else 1
