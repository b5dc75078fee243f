"""Finds the declaration of a pydantic model for a value inside its options."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple, Union, get_args, get_origin

from pydantic import BaseModel

from steelyard.modifiers.locate import KeyPath

__all__ = ["Model", "Place", "nested_models", "place_of"]

Model = type[BaseModel]


class Place(NamedTuple):
    """A value inside the options of a model.

    owner:   the model that has it as a field, or would have
    choices: the allowed words, if the field declares them
    """

    path: KeyPath
    value: Any
    owner: Model | None
    choices: tuple[str, ...]


def place_of(model: Model, given: Any, loc: Sequence[str | int]) -> Place:
    """Follow the location that pydantic gives for an error.

    Parts that are not in `given` are omitted: pydantic's names for the members of a union, or at
    the end the name of a missing field.
    """
    path: KeyPath = ()
    owner: Model | None = model
    inside: tuple[Model | None, int] = (model, 0)
    choices: tuple[str, ...] = ()
    value = given
    for part in loc:
        if not _holds(value, part):
            continue
        value = value[part]
        path = (*path, part)
        owner, inside, choices = _step(inside, part)
    return Place(path, value, owner, choices)


def _holds(value: Any, part: str | int) -> bool:
    if isinstance(value, (list, tuple)):
        return isinstance(part, int) and part < len(value)
    return isinstance(value, Mapping) and part in value


def _step(
    inside: tuple[Model | None, int], part: str | int
) -> tuple[Model | None, tuple[Model | None, int], tuple[str, ...]]:
    model, depth = inside
    if model is None or depth:
        return None, (model, max(depth - 1, 0)), ()
    field = model.model_fields.get(str(part))
    if field is None:
        return model, (None, 0), ()
    return model, _model_in(field.annotation), tuple(_words_in(field.annotation))


def nested_models(model: Model, given: Any) -> Iterator[tuple[KeyPath, Model, Any]]:
    """Yield the values given for fields that are models, or lists or mappings of models.

    >>> list(nested_models(QuantizationModifier, {"config_groups": {"group_0": {...}}}))
    [(("config_groups", "group_0"), QuantizationScheme, {...})]
    """
    for name, field in model.model_fields.items():
        if not isinstance(given, Mapping) or given.get(name) is None:
            continue
        nested, depth = _model_in(field.annotation)
        if nested is not None:
            for path, value in _at_depth(given[name], depth):
                yield (name, *path), nested, value


def _at_depth(value: Any, depth: int) -> Iterator[tuple[KeyPath, Any]]:
    if depth == 0:
        yield (), value
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    for key, item in items:
        for path, inner in _at_depth(item, depth - 1):
            yield (key, *path), inner


def _model_in(annotation: Any) -> tuple[Model | None, int]:
    """Return the model in an annotation, and the number of containers around it."""
    arguments = get_args(annotation)
    if not arguments:
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        return (annotation if is_model else None), 0
    if get_origin(annotation) in (Union, types.UnionType):
        found = [_model_in(argument) for argument in arguments]
        return next((each for each in found if each[0] is not None), (None, 0))
    nested, depth = _model_in(arguments[-1])
    return nested, depth + 1


def _words_in(annotation: Any) -> Iterator[str]:
    if isinstance(annotation, type) and issubclass(annotation, Enum):
        yield from (str(member.value) for member in annotation)
    elif get_origin(annotation) in (Union, types.UnionType):
        for argument in get_args(annotation):
            yield from _words_in(argument)
