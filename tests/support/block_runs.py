"""A model run block by block, and as it runs by itself."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.model.blocks import LayerSequence
from steelyard.model.precision import computing_in
from steelyard.model.source import Source


@torch.no_grad()
def run_in_sequence(source: Source, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the logits; only one layer is in memory at a time."""
    sequence = LayerSequence(source.model)
    model, layers = source.model, sequence.layers
    with (
        source.loaded(layers[0], f"{sequence.name}.0"),
        source.loaded(model, "", skip=(sequence.name,)),
        computing_in(model, torch.float32),
    ):
        started = sequence.start(batches, lambda: None)
    for index, layer in enumerate(layers):
        with source.loaded(layer, f"{sequence.name}.{index}"), computing_in(layer, torch.float32):
            for batch in started:
                batch.hidden = sequence.run(index, batch)
    with (
        source.loaded(model, "", skip=(sequence.name,)),
        computing_in(model, torch.float32),
    ):
        return [sequence.finish(batch).logits for batch in started]


@torch.no_grad()
def plain_logits(model: Any, batches: list[torch.Tensor]) -> list[torch.Tensor]:
    with computing_in(model, torch.float32):
        return [model(input_ids=batch, use_cache=False).logits for batch in batches]
