"""Memory of forwards that wait inside of a layer: how much they hold, and how many fit."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterable, Sequence
from types import FrameType

import torch

__all__ = ["CONCURRENT_BYTES", "at_once", "fits", "held_bytes"]

CONCURRENT_BYTES = 256 << 20
"""Bytes that batches in flight may hold if no stage waits for all of them; exceeded if one batch
per thread needs more."""


def at_once(tokens: Sequence[int], rate: float, budget: float) -> int:
    """Return how many batches fit into a budget; at least one.

    tokens: number of tokens of each batch
    rate:   bytes per token

    >>> at_once([10, 10, 40, 10], rate=8, budget=200)
    2
    """
    held = itertools.accumulate(count * rate for count in tokens)
    return max(sum(1 for _ in itertools.takewhile(lambda size: size <= budget, held)), 1)


def fits(size: int, held: Iterable[int], budget: int) -> bool:
    """Return whether one more batch may wait."""
    return size + sum(held) <= budget


def held_bytes(frame: FrameType | None) -> int:
    """Return the bytes of all tensors in the local variables of a forward suspended in `frame`."""
    found: dict[int, int] = {}
    while frame is not None:
        variables = frame.f_locals
        values = list(variables.values())
        while values:
            value = values.pop()
            if isinstance(value, torch.Tensor):
                storage = value.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
            elif isinstance(value, (tuple, list, dict)):
                values += value.values() if isinstance(value, dict) else value
        if isinstance(variables, dict) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            variables.clear()  # a copy before Python 3.13, which would keep the tensors alive
        frame = frame.f_back
    return sum(found.values())
