"""The stored tensors of one quantized weight, read and decoded a few rows at a time."""

from __future__ import annotations

import torch
from compressed_tensors.quantization import QuantizationScheme

from steelyard.checkpoint.shards import Shards
from steelyard.formats import CodeGrid, stored_as
from steelyard.formats.tensor_names import SCALE, SHAPE

__all__ = ["StoredWeight"]

Part = dict[str, torch.Tensor]


class StoredWeight:
    """A quantized weight in a checkpoint.

    names: local names of its stored tensors
    shape: (out, in) of the weight before it was quantized
    unit:  rows are read at multiples of it, so that no block and no packed word is split
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
        self._shards, self._module, self._names, self._scheme = shards, module, names, scheme
        self._format = stored_as(scheme)
        self.unit = self._format.row_unit(self.args)

    @property
    def precision(self) -> float:
        """The relative squared error of decoding itself: in bf16 where scales are codes."""
        scale = f"{self._module}.{SCALE}"
        codes = scale in self._shards and self._shards.info(scale).dtype.itemsize == 1
        return 2.0**-15 if codes else 1e-12

    def part(self, start: int, stop: int) -> Part:
        """Read the stored tensors of some rows."""
        return {name: self._read(name, start, stop) for name in self._names}

    def _read(self, local: str, start: int, stop: int) -> torch.Tensor:
        if local == SHAPE:
            return torch.tensor([stop - start, self.shape[1]])
        name = f"{self._module}.{local}"
        info = self._shards.info(name)
        spec = (info.dtype, info.shape)
        rows = self._format.rows_of(local, spec, self.shape, self.args, (start, stop))
        return self._shards.read(name) if rows is None else self._shards.read_rows(name, *rows)

    def decode(self, part: Part) -> torch.Tensor:
        """Return the rows that a server reconstructs, fp32."""
        return self._format.decode(part, self._scheme)

    def grid(self, part: Part) -> CodeGrid | None:
        """Return the values of the codes of these rows; None where they are unknown."""
        return self._format.grid(part, self._scheme)
