"""What is calibrated at once: a part of the model, and the batches that run through it."""

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

    forwards: run each batch through the block, and return what comes out
    take:     takes what comes out for the next block, batch after batch; None where nothing does
    tokens:   of each batch
    places:   of each batch: number in the run, and partial sum (`kernels.partial_sums`)
    """

    forwards: Sequence[Callable[[], Any]] = ()
    take: Callable[[Iterable[Any]], None] | None = None
    tokens: Sequence[int] = ()
    places: Sequence[tuple[int, int]] = ()


NO_DATA = Flow()


@dataclass(frozen=True)
class Part:
    """A part of the model that is calibrated at once: a layer, or all that is outside of them.

    without:   a module within `root` that is left out
    originals: hidden states of the unquantized model, into the part and out of it, by batch
    changed:   names of the tensors that transforms have changed
    """

    name: str
    root: Module
    without: Module | None = None
    originals: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)
    changed: set[str] = field(default_factory=set)
