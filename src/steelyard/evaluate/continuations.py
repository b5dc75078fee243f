"""Continues a few texts with both models, the most likely token each time.

A layer at a time would read every layer once per token, so a model is held in memory as a whole,
one after the other, and only if it fits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from steelyard.evaluate.token_figures import Continuation, Decode
from steelyard.model.inputs import without_cache
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory
from steelyard.model.precision import computing_in

__all__ = ["continuations"]

TEXTS, PROMPT, LENGTH = 3, 24, 24  # texts; tokens of each


def continuations(
    models: Sequence[LayerwiseModel],
    batches: Sequence[Mapping[str, torch.Tensor]],
    decode: Decode,
    advance: Callable[[], object] = bool,
) -> list[Continuation]:
    """Return continuations of the first texts; none if a model does not fit into memory.

    batches: samples; those of token ids alone are used
    """
    prompts = [
        batch["input_ids"][:1, :PROMPT]
        for batch in batches
        if set(batch) <= {"input_ids"} and batch["input_ids"].shape[1] >= PROMPT
    ][:TEXTS]
    if not prompts or not all(map(_fits, models)):
        return []
    texts = []
    for model in models:
        texts.append([decode(ids) for ids in _continued(model, torch.cat(prompts))])
        advance()
    shown = [decode(prompt[0].tolist()) for prompt in prompts]
    return [Continuation(*each) for each in zip(shown, *texts, strict=True)]


def _fits(model: LayerwiseModel) -> bool:
    elements: int = sum(parameter.numel() for parameter in model.source.model.parameters())
    return elements * DTYPE.itemsize <= default_memory()


@torch.no_grad()
def _continued(model: LayerwiseModel, ids: torch.Tensor) -> list[list[int]]:
    whole, start = model.source.model, ids.shape[1]
    with model.source.loaded(whole, ""), computing_in(whole, DTYPE), without_cache(whole):
        for _ in range(LENGTH):
            logits = whole(input_ids=ids).logits[:, -1]
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], 1)
    return [row[start:].tolist() for row in ids]
