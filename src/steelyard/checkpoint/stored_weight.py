"""The stored tensors of one quantized weight, read and decoded a few rows at a time.

The installed compressor of compressed-tensors does the decoding, as a server's loader would. The
step between two codes comes from it too: codes that are all the smallest and all the largest are
decoded with the stored scales.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import torch
from compressed_tensors.quantization import QuantizationScheme

from steelyard.checkpoint.layout import compressor_of, format_of, words_for
from steelyard.checkpoint.shards import Shards
from steelyard.kernels.rounding import quantized_range

__all__ = ["Grid", "StoredWeight"]

_ONES = 0x22  # two E2M1 codes of 1.0
_GRIDS = {"int": range(1, 9), "float": (4, 8)}  # bits
Part = dict[str, torch.Tensor]


class Grid(NamedTuple):
    """What the codes of some rows stand for: `offset + code * step`, each (rows, columns)."""

    offset: torch.Tensor
    step: torch.Tensor


class StoredWeight:
    """A quantized weight in a checkpoint.

    names: the local names of what is stored for it
    shape: (out, in) of the weight before it was quantized
    unit:  rows are cut at multiples of it, so that no block and no packed word is cut
    """

    def __init__(
        self,
        shards: Shards,
        module: str,
        names: list[str],
        scheme: QuantizationScheme,
        shape: tuple[int, int],
    ) -> None:
        assert scheme.weights is not None
        self.args = scheme.weights
        self.shape = shape
        self._shards, self._module, self._scheme = shards, module, scheme
        self._names = [name for name in names if name == "weight" or name.startswith("weight_")]
        self._codes = "weight_packed" if "weight_packed" in names else "weight"
        self._compressor = compressor_of(format_of(scheme))
        self._height = self.args.block_structure[0] if self.args.block_structure else 1
        self.unit = math.lcm(32, 32 // self.args.num_bits, self._height)

    @property
    def precision(self) -> float:
        """The relative squared error of decoding itself: in bf16 where scales are codes."""
        scale = f"{self._module}.weight_scale"
        codes = scale in self._shards and self._shards.info(scale).dtype.itemsize == 1
        return 2.0**-15 if codes else 1e-12

    def part(self, start: int, stop: int) -> Part:
        """Read what is stored for some rows."""
        return {name: self._read(name, start, stop) for name in self._names}

    def _read(self, local: str, start: int, stop: int) -> torch.Tensor:
        name = f"{self._module}.{local}"
        info = self._shards.info(name)
        if local == "weight_shape":
            return torch.tensor([stop - start, self.shape[1]])
        if local == "weight_zero_point" and info.dtype == torch.int32:
            first, last = (words_for(row, self.args.num_bits) for row in (start, stop))
            return self._shards.read_rows(name, first, last)
        if len(info.shape) != 2:
            return self._float_scale(local, self._shards.read(name))
        per = self._height if info.shape[0] < self.shape[0] else 1
        rows = self._shards.read_rows(name, start // per, -(-stop // per))
        return self._float_scale(local, rows)

    def _float_scale(self, local: str, value: torch.Tensor) -> torch.Tensor:
        """Widen a scale: else the product is rounded to bf16, which 8 bits notice."""
        return value.float() if local == "weight_scale" and value.dtype.itemsize > 1 else value

    def decode(self, part: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the rows that a server reconstructs, fp32."""
        decoded = self._compressor.decompress(dict(part), self._scheme)
        return torch.as_tensor(decoded["weight"]).float()

    def grid(self, part: Mapping[str, torch.Tensor]) -> Grid | None:
        """Return what the codes of these rows stand for; None for a format without codes that
        can be set to a value here."""
        if format_of(self._scheme) == "dense" or self.args.num_bits not in _GRIDS[self.args.type]:
            return None
        codes = part[self._codes]
        packed = self._codes == "weight_packed"
        if self.args.type == "float":
            ones = torch.full_like(codes, _ONES) if packed else torch.ones(codes.shape)
            step = self.decode({**part, self._codes: ones.to(codes.dtype)})
            return Grid(torch.zeros((), dtype=step.dtype), step)
        low, high = quantized_range(self.args)
        ends = (0, -1) if packed else (int(low), int(high))  # packed codes count from the lowest
        smallest, largest = (
            self.decode({**part, self._codes: torch.full_like(codes, end)}) for end in ends
        )
        step = (largest - smallest) / (high - low)
        return Grid(smallest - low * step, step)
