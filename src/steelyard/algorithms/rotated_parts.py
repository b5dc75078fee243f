"""The parts that modules play in a rotation, and the changes of their tensors.

embedding, writers   y Q: what they add to the residual stream
norms                gain 1: the gain g is folded into the readers
readers              W diag(g) Q
values               rows of each head of v times R2, and columns of each head of o
"""

from __future__ import annotations

import functools
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from steelyard.formats.served_rotation import ServedRotation
from steelyard.kernels.rotation import Rotation
from steelyard.model.rewrites import Rewrites
from steelyard.model.served_hooks import made_rotation, rotated_modules

__all__ = ["Parts", "Values", "add_residual", "add_served", "add_values"]


@dataclass(frozen=True)
class Values:
    """A Linear that makes the values of attention, and the one that reads them.

    first, size: rows of the source's weight that are values; a fused one has others before them
    head:        channels of a head
    """

    source: str
    reader: str
    first: int
    size: int
    head: int


@dataclass(frozen=True)
class Parts:
    """Names of the modules of a layer, or of the modules outside of layers.

    norms:   those that read the residual stream, with what they add to their weight: 1 in Gemma
    readers: Linear layers and routers -> the norm that they read; None for the stream itself
    writers: modules whose output is added to the stream; an embedding begins it
    """

    norms: Mapping[str, float] = field(default_factory=dict)
    readers: Mapping[str, str | None] = field(default_factory=dict)
    writers: tuple[str, ...] = ()
    embedding: str | None = None
    values: tuple[Values, ...] = ()

    def moved(self, before: str, after: str) -> Parts:
        """Return the same parts of another layer, whose names begin with `after`."""

        def name(given: str) -> str:
            return after + given.removeprefix(before)

        return Parts(
            {name(norm): offset for norm, offset in self.norms.items()},
            {name(r): None if norm is None else name(norm) for r, norm in self.readers.items()},
            tuple(map(name, self.writers)),
            self.embedding,
            tuple(
                Values(name(v.source), name(v.reader), v.first, v.size, v.head) for v in self.values
            ),
        )


def add_residual(
    rewrites: Rewrites, parts: Parts, rotation: Rotation, tensors: Container[str]
) -> None:
    """Rotate the residual stream of these parts.

    tensors: names of all tensors; some modules have a bias
    """
    for reader, norm in parts.readers.items():
        if norm is not None:
            gained = functools.partial(_with_gain, parts.norms[norm])
            rewrites.add(f"{reader}.weight", gained, f"{norm}.weight")
        rewrites.add(f"{reader}.weight", functools.partial(rotation.rotate, dim=1))
    for norm, offset in parts.norms.items():
        rewrites.add(f"{norm}.weight", functools.partial(torch.full_like, fill_value=1 - offset))
    for writer in parts.writers:
        rewrites.add(f"{writer}.weight", functools.partial(rotation.rotate, dim=0))
        if f"{writer}.bias" in tensors:
            rewrites.add(f"{writer}.bias", rotation.rotate)
    if parts.embedding is not None:
        rewrites.add(f"{parts.embedding}.weight", functools.partial(rotation.rotate, dim=1))


def add_values(
    rewrites: Rewrites, values: Values, rotation: Rotation, tensors: Container[str]
) -> None:
    """Rotate each head of the values; all heads that read one share its rotation."""
    rows = functools.partial(_rotated_rows, rotation, values.first, values.size)
    rewrites.add(f"{values.source}.weight", rows)
    if f"{values.source}.bias" in tensors:
        rewrites.add(f"{values.source}.bias", rows)
    rewrites.add(f"{values.reader}.weight", functools.partial(rotation.rotate, dim=1))


def add_served(rewrites: Rewrites, model: Any, rotation: ServedRotation) -> None:
    """Rotate the weights of modules whose inputs or outputs a server rotates."""
    for name, module in rotated_modules(model, rotation):
        made = made_rotation(rotation, rotation.size(tuple(module.weight.shape)))
        dim = 1 if rotation.side == "input" else 0
        rewrites.add(f"{name}.weight", functools.partial(made.rotate, dim=dim))


def _with_gain(offset: float, weight: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    return weight * (gain + offset)


def _rotated_rows(rotation: Rotation, first: int, size: int, weight: torch.Tensor) -> torch.Tensor:
    rotated = weight.clone()
    rotated[first : first + size] = rotation.rotate(weight[first : first + size], dim=0)
    return rotated
