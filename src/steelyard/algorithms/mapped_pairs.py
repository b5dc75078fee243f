"""The pairs that a recipe's `mappings` name, as patterns of a source and of its readers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

from compressed_tensors.utils.match import is_match

from steelyard.algorithms.block import Block
from steelyard.algorithms.pairs import Pair

__all__ = ["mapped_pairs"]


def mapped_pairs(
    block: Block,
    mappings: Sequence[tuple[str, Sequence[str]]],
    fitted: Callable[[str, Sequence[str]], Pair | None],
) -> Iterator[list[Pair]]:
    """Yield the pairs of each mapping in a block, to be checked at once.

    A pattern may match in each of many experts: a reader belongs to the source whose name has the
    longest beginning in common with its own.

    fitted: returns the pair of a source and its readers, None if their widths do not fit
    """
    for source, readers in mappings:
        sources = _matches(block, [source])
        owned: dict[str, list[str]] = {}
        for reader in _matches(block, readers) if sources else ():
            nearest = max(sources, key=partial(_common, reader))
            if nearest != reader:
                owned.setdefault(nearest, []).append(reader)
        pairs = [fitted(name, names) for name, names in owned.items()]
        if found := [pair for pair in pairs if pair is not None]:
            yield found


def _matches(block: Block, patterns: Sequence[str]) -> list[str]:
    return [name for name, module in block.within.items() if is_match(name, module, list(patterns))]


def _common(one: str, other: str) -> int:
    """Return how many parts two names have in common from the start."""
    same = [a == b for a, b in zip(one.split("."), other.split("."), strict=False)]
    return same.index(False) if False in same else len(same)
