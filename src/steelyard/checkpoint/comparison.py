"""Compares the tensors of two checkpoints byte by byte, whatever their files."""

from __future__ import annotations

from collections.abc import Iterator

from steelyard.checkpoint.shards import Shards

__all__ = ["differences"]


def differences(first: Shards, second: Shards) -> Iterator[str]:
    """Yield a line for each tensor that only one has, or whose type, shape or bytes differ."""
    for name in dict.fromkeys([*first, *second]):
        if name not in first or name not in second:
            here = "first" if name in first else "second"
            yield f"{name} is only in the {here} checkpoint"
            continue
        one, two = first.info(name), second.info(name)
        if (one.dtype, one.shape) != (two.dtype, two.shape):
            yield f"{name} is {one.dtype} {one.shape}, the other {two.dtype} {two.shape}"
        elif not first.equal(name, second):
            yield f"{name} has other bytes"
