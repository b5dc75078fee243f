"""Embeddings as targets: which schemes vLLM and transformers read for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch.nn import Embedding

from steelyard.formats import format_of, stored_as
from steelyard.model.inputs import input_embedding

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan, Planned

__all__ = ["embedding_errors", "embedding_warnings"]

_SERVED = "symmetric integers in groups or channels, such as W4A16"


def embedding_errors(plan: Plan, model: Any) -> Iterator[str]:
    """Yield embeddings whose inputs would be quantized, or that nothing can read."""
    for planned in _embeddings(plan, model):
        if planned.scheme.input_activations is not None:
            yield (
                f"{planned.name} is an Embedding, and its input, token ids, cannot be quantized: "
                f"give it a scheme without input_activations, or remove it from {planned.group}"
            )
        elif stored_as(planned.scheme).is_packed and not _is_served(planned, model):
            yield (
                f"{planned.name} is an Embedding, which neither vLLM nor transformers reads as "
                f"{format_of(planned.scheme)}: vLLM reads the token embedding as {_SERVED}, "
                "transformers any in 8-bit floats; choose one of them, or remove it from "
                f"{planned.group}"
            )


def embedding_warnings(plan: Plan, model: Any) -> Iterator[str]:
    """Yield embeddings that transformers reads, but vLLM does not."""
    names = [
        planned.name
        for planned in _embeddings(plan, model)
        if not (stored_as(planned.scheme).is_packed and _is_served(planned, model))
    ]
    if names:
        more = f" and {len(names) - 1} more" if names[1:] else ""
        yield (
            f"vLLM does not read {names[0]}{more} as stored here; of embeddings it reads the token "
            f"embedding, as {_SERVED}. transformers loads it"
        )


def _embeddings(plan: Plan, model: Any) -> list[Planned]:
    modules = dict(model.named_modules())
    weighed = [p for p in plan.quantized if p.scheme.weights is not None]
    return [p for p in weighed if isinstance(modules[p.name], Embedding)]


def _is_served(planned: Planned, model: Any) -> bool:
    """Whether vLLM 0.32 looks rows up in it."""
    args = planned.scheme.weights
    assert args is not None
    plain = args.type == "int" and args.symmetric and args.strategy in ("group", "channel")
    return plain and input_embedding(model) in (None, planned.name)
