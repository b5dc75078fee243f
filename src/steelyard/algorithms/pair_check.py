"""Checks that folding a factor into a pair leaves the output of its block as it is.

The block runs three times: as it is, with a random factor on the readers alone, and with the factor
folded into source and readers. Factors are powers of two, so a true pair gives the same bits, but
for norms with an offset. The second run tells how large the difference of a wrong pair is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import torch

from steelyard.algorithms.block import Block
from steelyard.algorithms.pairs import Pair, folded

__all__ = ["PairCheck", "replaced_tensors"]

_TOLERANCE = 1e-3  # of the difference that a wrong pair makes


class PairCheck:
    """Compares the output of a block, for this rank's first batch."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.output = block.forward(0)

    def problem(self, pairs: Sequence[Pair]) -> str | None:
        """Return why pairs cannot be balanced, all of them at once; None if they can."""
        generator = torch.Generator().manual_seed(0)
        dtype = self.output.dtype
        whole: dict[str, torch.Tensor] = {}
        for pair in pairs:
            signs = torch.randint(0, 2, (pair.size,), generator=generator)
            whole |= folded(self.block, pair, 2.0 ** (2 * signs - 1), dtype).tensors
        sources = {f"{p.source}.{leaf}" for p in pairs for leaf in ("weight", "bias")}
        half = {name: value for name, value in whole.items() if name not in sources}
        wrong, right = self._difference(half), self._difference(whole)
        if wrong == 0:
            return "the block's output does not depend on it"
        if right <= max(_TOLERANCE, 8 * torch.finfo(dtype).eps) * wrong:
            return None
        source = pairs[0].source.rpartition(".")[2]
        return f"more than its readers depend on the output of {source}"

    def _difference(self, changed: Mapping[str, torch.Tensor]) -> float:
        with replaced_tensors(self.block, changed):
            off = self.block.forward(0).double() - self.output.double()
        return float(off.norm())


@contextlib.contextmanager
def replaced_tensors(block: Block, changed: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Replace tensors of a block inside the context, and restore them after."""
    kept: dict[str, torch.Tensor] = {}
    try:
        for name, value in changed.items():
            parameter = block.parameter(name)
            kept[name] = parameter.data
            parameter.data = value.to(parameter.device)
        yield
    finally:
        for name, value in kept.items():
            block.parameter(name).data = value
