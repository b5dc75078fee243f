"""One batch on its way through the layers: its inputs, recorded calls, and outputs of layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from steelyard.model.placeholders import Structure, refs_in

__all__ = ["Batch", "Call"]


@dataclass(frozen=True)
class Call:
    """Arguments of one layer; a `Ref` stands for the output of another layer.

    assumed: structure of the output that the stub returned for the layer
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    assumed: Structure

    @property
    def layers(self) -> set[int]:
        return {ref.layer for ref in refs_in((self.args, self.kwargs))}


@dataclass
class Batch:
    """One batch: the model's inputs, and the state of its forward.

    outputs: layer -> its output, while that is needed
    calls:   layer -> its arguments, for layers that have yet to run
    needed:  layers whose values the forward computes with
    waiting: layers whose values it needs to continue; None when it has finished
    """

    inputs: Mapping[str, torch.Tensor]
    outputs: dict[int, Any] = field(default_factory=dict)
    calls: dict[int, Call] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)
    waiting: set[int] | None = field(default_factory=set)

    def due(self, index: int) -> bool:
        """Whether another forward can record calls of `index` or later layers."""
        missing = index not in self.calls and self.waiting is not None
        return missing and all(layer < index for layer in self.waiting or ())
