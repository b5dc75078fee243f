"""Placeholders for the outputs of layers that have not run yet, or whose outputs were freed.

A model's forward may pass a placeholder to the next layer, and read its shape or type. Anything
else needs the values, and raises `Touched`: the forward cannot continue without them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from steelyard.errors import PipelineError

__all__ = [
    "Ref",
    "Structure",
    "Touched",
    "Unknown",
    "filled",
    "first_tensor",
    "places_in",
    "refs_in",
    "replaced",
    "structure_of",
]

Place = tuple[int | str, ...]
"""Path of a tensor within the output of a layer."""

Structure = Any
"""Output of a layer, in JSON's types: "hidden", "tensor", None, or a list or dict of these."""

_PROPERTIES = ("shape", "dtype", "device", "ndim", "layout", "is_cuda", "requires_grad", "is_meta")
_ASKING = {
    *(getattr(torch.Tensor, name).__get__ for name in _PROPERTIES),
    *(torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.__len__),
    torch.Tensor.is_floating_point,
}


class Touched(Exception):
    """The forward needs values of layers; `layers` are their indices."""

    def __init__(self, layers: set[int]) -> None:
        super().__init__(f"values of layers {sorted(layers)} are needed")
        self.layers = layers


@dataclass(frozen=True)
class Ref:
    """A tensor that a layer returns: the index of the layer, and the path in its output."""

    layer: int
    place: Place

    def of(self, output: Any) -> Any:
        for part in self.place:
            output = output[part]
        return output


class Unknown(torch.Tensor):
    """A tensor without values.

    like: a tensor of the same shape and type; None if they are not known either
    """

    ref: Ref
    like: torch.Tensor | None

    @classmethod
    def of(cls, ref: Ref, like: torch.Tensor | None) -> Unknown:
        shape, dtype = ((), torch.float32) if like is None else (like.shape, like.dtype)
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.ref, made.like = ref, like
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        unknown = [t for _, t in places_in((args, kwargs)) if isinstance(t, Unknown)]
        if func in _ASKING and all(each.like is not None for each in unknown):
            known = replaced((args, kwargs), lambda t: t.like if isinstance(t, Unknown) else t)
            return func(*known[0], **known[1])
        raise Touched({each.ref.layer for each in unknown})


def structure_of(output: Any, hidden: torch.Tensor, where: str) -> Structure:
    """Return the structure of a layer's output.

    hidden: the hidden state that went in; an output of its shape and type is known in advance
    where:  the layer, for messages
    """
    if isinstance(output, torch.Tensor):
        alike = output.shape == hidden.shape and output.dtype == hidden.dtype
        return "hidden" if alike else "tensor"
    if output is None:
        return None
    if type(output) in (tuple, list):
        parts = [structure_of(each, hidden, where) for each in output]
        return {"tuple" if type(output) is tuple else "list": parts}
    if type(output) is dict and all(isinstance(key, str) for key in output):
        return {"dict": {key: structure_of(each, hidden, where) for key, each in output.items()}}
    raise PipelineError(
        f"{where} returns a {type(output).__name__}, which cannot be kept between two layers; "
        'pipeline="basic" runs the model as a whole'
    )


def filled(structure: Structure, leaf: Callable[[Place, str], Any]) -> Any:
    """Return an output of the given structure.

    leaf: returns the tensor for a path and its kind, "hidden" or "tensor"
    """

    def at(part: Structure, place: Place) -> Any:
        if part is None:
            return None
        if isinstance(part, str):
            return leaf(place, part)
        ((kind, parts),) = part.items()
        if kind == "dict":
            return {key: at(each, (*place, key)) for key, each in parts.items()}
        items = [at(each, (*place, i)) for i, each in enumerate(parts)]
        return tuple(items) if kind == "tuple" else items

    return at(structure, ())


def replaced(value: Any, by: Callable[[Any], Any]) -> Any:
    """Return a nested value with `by(leaf)` for its leaves; containers are copied.

    An empty dict is a leaf: layers may fill it for those after them.
    """
    if type(value) in (tuple, list):
        return type(value)(replaced(each, by) for each in value)
    if type(value) is dict and value:
        return {key: replaced(each, by) for key, each in value.items()}
    return by(value)


def places_in(value: Any, place: Place = ()) -> Iterator[tuple[Place, torch.Tensor]]:
    """Yield the tensors of a nested value, each with its path."""
    if isinstance(value, torch.Tensor):
        yield place, value
    elif isinstance(value, (tuple, list, dict)):
        for key, each in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(each, (*place, key))


def first_tensor(value: Any) -> Any:
    """Return the first tensor of a layer's output, the hidden state; None if there is none."""
    return next((tensor for _, tensor in places_in(value)), None)


def refs_in(value: Any) -> Iterator[Ref]:
    if isinstance(value, Ref):
        yield value
    elif type(value) in (tuple, list, dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from refs_in(each)
