"""Finds the layers of a model, which run one after another with one in memory at a time.

A model may have several stacks of layers: those of a vision tower, of an encoder, of the decoder.
Layers of the text decoder come last, the others in the order of the class.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.nn import Module, ModuleList

from steelyard.errors import PipelineError

__all__ = ["AS_A_WHOLE", "Layer", "decoder_layers", "model_layers", "refusal"]

AS_A_WHOLE = 'pipeline="basic" runs the model as a whole'


@dataclass(frozen=True)
class Layer:
    """One layer of a model, with its name in it."""

    name: str
    module: Module


def refusal(model: Any, why: str) -> PipelineError:
    """Return the error for a model whose layers cannot run one after another."""
    return PipelineError(
        f"{type(model).__name__} {why}, so its layers cannot run alone; {AS_A_WHOLE}"
    )


def model_layers(model: Any) -> list[Layer]:
    """Return the layers of all stacks, in run order.

    Raises a PipelineError for a model that cannot run layer by layer.
    """
    stacks = list(_stacks(model))
    text = set(_text_model(model).modules())
    stacks.sort(key=lambda stack: stack[1] in text and text != set(model.modules()))
    layers = [Layer(f"{n}.{i}", m) for n, stack in stacks for i, m in stack.named_children()]
    if not layers:
        decoder_layers(model)  # raises with the reason
    seen: dict[Module, str] = {}
    for layer in layers:
        for part in layer.module.modules():
            if part in seen and any(True for _ in part.parameters(recurse=False)):
                raise PipelineError(
                    f"{seen[part]} and {layer.name} of {type(model).__name__} share a module, so "
                    f"they cannot be calibrated one after another; {AS_A_WHOLE}"
                )
            seen[part] = layer.name
    return layers


def decoder_layers(model: Any) -> tuple[str, ModuleList]:
    """Return the name of the list of decoder layers, and the list."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    depth = getattr(config, "num_hidden_layers", None)
    text = set(_text_model(model).modules())  # a vision tower may be as deep
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, ModuleList) and len(m) > 0]
    lists = [(n, m) for n, m in lists if m in text]
    known = [(n, m) for n, m in lists if all(type(c).__name__ in classes for c in m.children())]
    deep = [(n, m) for n, m in known or lists if depth is None or len(m) == depth]
    if len(deep) != 1:
        raise PipelineError(
            f"{type(model).__name__} has {len(deep)} lists of {depth} layers, so its decoder "
            f"layers cannot be identified; {AS_A_WHOLE}"
        )
    return deep[0]


def _stacks(model: Any) -> Iterator[tuple[str, ModuleList]]:
    """Yield the outermost lists of layers, in the order of the class."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    classes = {
        name
        for module in model.modules()
        for name in getattr(module, "_no_split_modules", None) or ()
    }
    try:
        decoder = decoder_layers(model)[1]
    except PipelineError:
        decoder = None
    inside: set[Module] = set()
    for name, module in model.named_modules():
        if module in inside or not isinstance(module, ModuleList) or len(module) == 0:
            continue
        layers = all(
            isinstance(m, GradientCheckpointingLayer) or type(m).__name__ in classes
            for m in module.children()
        )
        if layers or module is decoder:
            inside.update(module.modules())
            yield name, module


def _text_model(model: Any) -> Module:
    """Return the text decoder; the whole model if it does not name one."""
    found: Module | None = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(found, Module) and any(isinstance(m, ModuleList) for m in found.modules()):
        return found
    whole: Module = model  # some classes call their output head the decoder
    return whole
