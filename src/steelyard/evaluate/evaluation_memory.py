"""Estimates the most memory that an evaluation takes on an accelerator.

At a time the device holds one layer of one model, in the stored type and in fp32, and the layer
that was read ahead; or what is outside of layers; or, while tokens are scored, the heads of both
models and their logits. Besides, hidden states that have room there, and the batch in the layer.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from steelyard.errors import PipelineError
from steelyard.model.inputs import output_head
from steelyard.model.layerwise import DTYPE, LayerwiseModel
from steelyard.words import count

__all__ = ["LogitSizes", "device_bytes"]

_WIDE = DTYPE.itemsize
_SCORES = 12  # fp64 tensors of the logits that are scored at a time
_TABLES = 1 << 16  # limits of types, masks, positions


@dataclass
class LogitSizes:
    """Numbers of logits, each at a time; tokens are scored one by one, so they change no figure.

    projected: of one model that are computed
    scored:    of both that are compared; few, so that they fit a CPU cache in fp64
    """

    projected: int = 1 << 24
    scored: int = 1 << 20

    def positions(self, vocabulary: int, samples: int) -> int:
        """Return how many positions of each sample are computed at a time."""
        return max(1, self.projected // (samples * vocabulary))

    def halve(self, shape: Sequence[int], error: torch.OutOfMemoryError, notes: list[str]) -> None:
        """Halve both after they did not fit on the device; raise at one position of each sample.

        shape: samples, tokens and vocabulary of the batch
        """
        traceback.clear_frames(error.__traceback__)  # which hold the logits
        rows, length, vocabulary = shape
        if self.projected <= rows * vocabulary:
            raise PipelineError(
                f"out of memory on the device with the logits of {count(rows, 'sample')} at one "
                f"position; use batch_size={max(rows // 2, 1)}, or device='cpu'"
            ) from error
        self.projected = min(self.projected, rows * length * vocabulary) // 2
        self.scored = max(min(self.scored, self.projected) // 2, 1)
        notes.append(
            f"the device ran out of memory while tokens were scored; the run went on with "
            f"{self.projected:,} logits at a time"
        )


def device_bytes(
    models: Sequence[LayerwiseModel],
    states: int,
    batch: Sequence[int],
    tokens: int,
    sizes: LogitSizes,
) -> int:
    """Return the bytes that an evaluation takes on the device at most.

    states: bytes of hidden states on the device
    batch:  samples and tokens per sample of the largest batch
    tokens: of all samples
    sizes:  of logits
    """
    layers = max(_layer_bytes(each.module) for m in models for each in m.sequence.layers)
    outside = max(_outside_bytes(model) for model in models)
    heads = 2 * max(_outside_bytes(model, with_head=True) for model in models)
    rows, length = batch
    vocabulary = models[0].vocab_size
    logits = min(max(sizes.projected, rows * vocabulary), rows * length * vocabulary)
    scored = min(max(sizes.scored, vocabulary), logits)
    scoring = heads + 2 * 2 * _WIDE * logits + 8 * _SCORES * scored
    inside = _WIDE * rows * length * max(_width(model) for model in models)
    return max(layers + inside, outside + inside, scoring) + states + 32 * tokens + _TABLES


def _layer_bytes(layer: Module) -> int:
    """Return the bytes of a layer: stored, in fp32, rounded once more, and the one read ahead."""
    values = sum(p.numel() for p in layer.parameters())
    return sum(2 * p.nbytes for p in layer.parameters()) + 2 * _WIDE * values


def _outside_bytes(model: LayerwiseModel, with_head: bool = False) -> int:
    """Return the bytes of everything outside of layers, stored and in fp32."""
    whole: Any = model.source.model
    inside = {id(p) for p in model.sequence.modules.parameters()}
    head = output_head(whole)
    left_out = set() if with_head or head is None else _only_of(whole, head)
    outside = [p for p in whole.parameters() if id(p) not in inside | left_out]
    return sum(p.nbytes + _WIDE * p.numel() for p in outside)


def _only_of(model: Any, head: str) -> set[int]:
    """Return the parameters of the head, unless the embedding has them too."""
    tied = {id(p) for p in model.get_input_embeddings().parameters()}
    return {id(p) for p in model.get_submodule(head).parameters()} - tied


def _width(model: LayerwiseModel) -> int:
    """Return fp32 values per token that a layer computes with: states, projections, and the MLP."""
    sizes = [
        p.shape[0] for each in model.sequence.layers for p in each.module.parameters() if p.ndim
    ]
    return 12 * model.hidden_size + 4 * max(sizes, default=0)
