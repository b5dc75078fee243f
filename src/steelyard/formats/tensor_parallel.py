"""How tensor parallelism splits a quantized weight over processes."""

from __future__ import annotations

from typing import NamedTuple

from compressed_tensors.quantization import QuantizationArgs

from steelyard.kernels.scale_blocks import divides

__all__ = ["Split", "split_of"]

_BY_INPUT = ("o_proj", "down_proj", "out_proj", "dense", "w2", "fc2", "wo")
"""Layers that servers split along their input; all others are split along their output."""


class Split(NamedTuple):
    """The side of a weight that is split.

    size: rows or columns of the weight
    unit: rows or columns that share a scale, which no process can split
    """

    by_input: bool
    size: int
    unit: int

    @property
    def side(self) -> str:
        return "columns" if self.by_input else "rows"

    def breaks(self, processes: int) -> bool:
        """Whether whole units cannot be assigned evenly to this number of processes."""
        return divides(self.unit, self.size) and not divides(processes * self.unit, self.size)


def split_of(name: str, args: QuantizationArgs, shape: tuple[int, int]) -> Split:
    """Return how the weight of a module is split.

    >>> split_of("mlp.down_proj", QuantizationArgs(strategy="group", group_size=128), (64, 384))
    Split(by_input=True, size=384, unit=128)
    """
    rows, columns = shape
    by_input = name.rpartition(".")[2] in _BY_INPUT
    if args.strategy == "block":
        unit = args.block_structure[1 if by_input else 0]
    else:
        unit = max(args.group_size or 1, 1) if by_input else 1
    return Split(by_input, columns if by_input else rows, int(unit))
