"""A part of the model that is calibrated at once, and the batches that run through it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module

__all__ = ["NO_DATA", "Flow", "Part"]


@dataclass(frozen=True)
class Flow:
    """The batches of a block.

    forwards: one per batch: runs it through the block and returns the output
    collect:  receives the outputs for the next block, in batch order; None if there is no next
    tokens:   number of tokens of each batch
    places:   of each batch, number in the run and partial sum (`kernels.partial_sums`)
    originals:    one per batch: runs it as in the unquantized model through a copy of the block;
                  empty if no algorithm needs that
    put_original: receives the number and the output of each of those
    padding:  mask of each batch's real tokens, (batch, seq); None where there is no padding
    advance:  receives the share of the block's tuning that was done, and a text
    """

    forwards: Sequence[Callable[[], Any]] = ()
    collect: Callable[[Iterable[Any]], None] | None = None
    tokens: Sequence[int] = ()
    places: Sequence[tuple[int, int]] = ()
    originals: Sequence[Callable[[Module], Any]] = ()
    put_original: Callable[[int, Any], None] = lambda _index, _output: None
    padding: Sequence[torch.Tensor | None] = ()
    advance: Callable[[float, str], None] = lambda _share, _where: None


NO_DATA = Flow()


@dataclass(frozen=True)
class Part:
    """A part of the model that is calibrated at once: a layer, or everything outside of layers.

    without:   a submodule of `root` to leave out
    originals: hidden states of the unquantized model in and out of the part, by batch
    changed:   names of the tensors that transforms changed
    """

    name: str
    root: Module
    without: Module | None = None
    originals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
