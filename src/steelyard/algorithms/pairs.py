"""A balanced pair: a norm or Linear, and the Linear layers that read its output.

Dividing the output of the source by a factor for each channel, and multiplying the columns of the
readers by it, leaves the model's output as it is. Both fold into the stored weights.

    source    gain of a norm (d,), or rows of a Linear (d, in)         divided by factor
    readers   weights (out, d * repeats)                               columns times factor

With grouped-query attention the output of v_proj is repeated: each of its heads feeds `repeats`
heads of o_proj's input, which share its factors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from steelyard.algorithms.block import Block
from steelyard.distributed import sendable

__all__ = ["Folded", "Pair", "folded"]


@sendable
@dataclass(frozen=True)
class Pair:
    """Modules of one block, by name.

    size:    number of factors
    first:   first row of the source's weight that they divide; a fused Linear has others before it
    repeats: how many times the readers see each head of the source's output
    head:    channels of a head
    offset:  what a norm adds to its weight before it multiplies, such as 1 in Gemma
    """

    source: str
    readers: tuple[str, ...]
    size: int
    first: int = 0
    repeats: int = 1
    head: int = 1
    offset: float = 0.0

    def spread(self, factor: torch.Tensor) -> torch.Tensor:
        """Return the factor of each input channel of the readers: (size,) -> (size * repeats,)."""
        heads = factor.reshape(-1, 1, self.head).expand(-1, self.repeats, -1)
        return heads.reshape(-1)

    def largest(self, value: torch.Tensor) -> torch.Tensor:
        """Return the largest value of channels that share a factor: (size * repeats,) -> (size,)"""
        return value.reshape(-1, self.repeats, self.head).amax(1).reshape(-1)

    def mean(self, value: torch.Tensor) -> torch.Tensor:
        """Return the mean of channels that share a factor: (size * repeats,) -> (size,)."""
        return value.reshape(-1, self.repeats, self.head).mean(1).reshape(-1)

    def __str__(self) -> str:
        return f"{self.source} -> {', '.join(name.rpartition('.')[2] for name in self.readers)}"


@dataclass(frozen=True)
class Folded:
    """The tensors of a pair with a factor folded in.

    tensors: by name
    columns: (size * repeats,), what the input of the readers is divided by
    """

    tensors: dict[str, torch.Tensor]
    columns: torch.Tensor


def folded(
    block: Block, pair: Pair, factor: torch.Tensor, dtype: torch.dtype | None = None
) -> Folded:
    """Divide the output of a pair's source by `factor`, (size,), and multiply its readers by it.

    The gain of a norm is rounded to its stored type first. The readers make up for the gain as it
    is stored, so its rounding changes nothing: with a gain of 1 + weight in bf16 it would.

    dtype: of the returned tensors; None for the type that each is stored in
    """
    source: Any = block.within[pair.source]
    weight = source.weight.data
    factor = factor.to(weight.device, torch.float32)
    changed: dict[str, torch.Tensor] = {}
    if weight.ndim == 1:
        stored, factor = _gain(weight, factor, pair.offset, dtype or weight.dtype)
        changed[f"{pair.source}.weight"] = stored
    else:
        changed[f"{pair.source}.weight"] = _divided(weight, factor[:, None], pair, dtype)
    bias = getattr(source, "bias", None)
    if isinstance(bias, torch.Tensor):
        changed[f"{pair.source}.bias"] = _divided(bias.data, factor, pair, dtype)
    columns = pair.spread(factor)
    for name in pair.readers:
        before = block.tensor(f"{name}.weight")
        changed[f"{name}.weight"] = (before.float() * columns).to(dtype or before.dtype)
    return Folded(changed, columns)


def _divided(
    value: torch.Tensor, factor: torch.Tensor, pair: Pair, dtype: torch.dtype | None
) -> torch.Tensor:
    wide = value.to(torch.float32, copy=True)
    wide[pair.first : pair.first + pair.size] /= factor
    return wide.to(dtype or value.dtype)


def _gain(
    weight: torch.Tensor, factor: torch.Tensor, offset: float, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the stored weight of a norm, and the factor that it divides by as stored."""
    gain = weight.float() + offset
    stored = (gain / factor - offset).to(dtype)
    after = stored.float() + offset
    usable = (gain != 0) & (after != 0) & after.isfinite()
    stored = torch.where(usable, stored, weight.to(dtype))
    return stored, torch.where(usable, gain / torch.where(usable, after, 1), 1)
