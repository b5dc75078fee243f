"""Estimates the most memory that an evaluation takes on an accelerator.

At a time the device holds one layer of one model, in the stored type and in fp32, and the layer
that was read ahead; or what is outside of layers; or, while tokens are scored, the heads of both
models and their logits. Besides, hidden states that have room there, and the batch in the layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.nn import Module

from steelyard.model.inputs import output_head
from steelyard.model.layerwise import DTYPE, LayerwiseModel

__all__ = ["device_bytes"]

_WIDE = DTYPE.itemsize
_SCORES = 12  # fp64 tensors of the logits that are scored at a time
_TABLES = 1 << 16  # limits of types, masks, positions


def device_bytes(
    models: Sequence[LayerwiseModel],
    states: int,
    batch: Sequence[int],
    tokens: int,
    projected: int,
    scored: int,
) -> int:
    """Return the bytes that an evaluation takes on the device at most.

    states:    bytes of hidden states on the device
    batch:     samples and tokens per sample of the largest batch
    tokens:    of all samples
    projected: most logits of one model that are computed at a time
    scored:    most logits that are scored at a time
    """
    layers = max(_layer_bytes(each.module) for m in models for each in m.sequence.layers)
    outside = max(_outside_bytes(model) for model in models)
    heads = 2 * max(_outside_bytes(model, with_head=True) for model in models)
    rows, length = batch
    vocabulary = models[0].vocab_size
    logits = min(max(projected, rows * vocabulary), rows * length * vocabulary)
    scoring = heads + 2 * 2 * _WIDE * logits + 8 * _SCORES * min(max(scored, vocabulary), logits)
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
