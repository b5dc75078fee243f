"""A model run block by block, and as it runs by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.inputs import call_options, without_cache
from steelyard.model.precision import computing_in
from steelyard.model.source import Source

Given = torch.Tensor | Mapping[str, torch.Tensor]


@torch.no_grad()
def run_in_sequence(
    source: Source, batches: Sequence[Given], forwards: list[int] | None = None
) -> list[Any]:
    """Return the outputs of the model; only one layer is in memory at a time.

    forwards: gets the layers at which the model's forward ran, once for each batch
    """
    sequence, model = LayerSequence(source.model), source.model
    running = [Batch(inputs_of(given)) for given in batches]
    with sequence:
        for index, layer in enumerate(sequence.layers):
            with (
                source.loaded(model, "", sequence.modules),
                computing_in(model, torch.float32, without=sequence.modules),
            ):
                for batch in running:
                    if batch.due(index):
                        sequence.advance(batch, index)
                        if forwards is not None:
                            forwards.append(index)
            with (
                source.loaded(layer.module, layer.name),
                computing_in(layer.module, torch.float32),
            ):
                for batch in running:
                    if index in batch.calls:
                        sequence.put(index, batch, sequence.run(index, batch))
        with (
            source.loaded(model, "", sequence.modules),
            computing_in(model, torch.float32, without=sequence.modules),
        ):
            return [sequence.finish(batch) for batch in running]


@torch.no_grad()
def plain_outputs(model: Any, batches: Sequence[Given]) -> list[Any]:
    options = call_options(model)
    with computing_in(model, torch.float32), without_cache(model):
        return [model(**inputs_of(given), **options) for given in batches]


def inputs_of(given: Given) -> dict[str, torch.Tensor]:
    return {"input_ids": given} if isinstance(given, torch.Tensor) else dict(given)
