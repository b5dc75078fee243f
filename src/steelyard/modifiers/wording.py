"""Rewords pydantic's errors for recipes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from steelyard.errors import nearest
from steelyard.modifiers.fields import Model, place_of
from steelyard.modifiers.locate import KeyPath, Problem

__all__ = ["first_line", "got", "reworded"]

KINDS = {
    "string": "text",
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "list": "a list",
    "tuple": "a list",
    "dict": "a mapping",
    "mapping": "a mapping",
    "model": "a mapping",
    "none": "nothing",
}
BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


class _Said(NamedTuple):
    path: KeyPath
    text: str
    kind: str | None
    """The expected kind of value, if only the type is wrong."""


def reworded(errors: Iterable[Any], model: Model, given: Any, path: KeyPath) -> list[Problem]:
    """Return the problems of a validation error's `errors()`; `given` is the value at `path`."""
    said = [_said(error, model, given) for error in errors]
    problems: dict[KeyPath, list[str]] = {}
    for one in said:
        nested = [other for other in said if other.path[: len(one.path)] == one.path]
        if one.kind is None:
            text = one.text
        elif any(other.kind is None or other.path != one.path for other in nested):
            continue  # the wrong member of a union; another one's error says more
        else:
            kinds = dict.fromkeys(other.kind for other in nested if other.kind)
            text = f"must be {' or '.join(kinds)}, {one.text}"
        texts = problems.setdefault((*path, *one.path), [])
        if text not in texts:
            texts.append(text)
    return [(at, text) for at, texts in problems.items() for text in texts]


def _said(error: Any, model: Model, given: Any) -> _Said:
    place = place_of(model, given, error["loc"])
    kind, context, shown = error["type"], error.get("ctx", {}), got(place.value)
    if kind == "extra_forbidden":
        name = str(place.path[-1])
        known = place.owner.model_fields if place.owner else ()
        return _Said(place.path, f"unknown key {name!r}: {nearest(name, known)}", None)
    if kind == "missing":
        name = str(error["loc"][-1])
        return _Said((*place.path, name), "is missing", None)
    if kind == "invalid_key" or (error["loc"] and error["loc"][-1] == "[key]"):
        return _Said(place.path, "a key must be text", None)
    value = place.value
    if place.choices and isinstance(value, str) and value.lower() not in place.choices:
        hint = nearest(value, place.choices)
        return _Said(place.path, f"there is no {place.path[-1]} {value!r}: {hint}", None)
    if kind == "value_error":
        text = first_line(context["error"])
        quoted = isinstance(value, (Mapping, list, tuple)) or str(value) in text
        return _Said(place.path, text if quoted else f"{text}, {shown}", None)
    if kind in BOUNDS:
        words, key = BOUNDS[kind]
        return _Said(place.path, f"must be {words} {context[key]}, {shown}", None)
    if kind == "is_instance_of":
        return _Said(place.path, shown, f"a {context['class']}")
    for prefix, words in KINDS.items():
        if kind.startswith(f"{prefix}_"):
            return _Said(place.path, shown, words)
    must = str(error["msg"]).replace("Input should be", "must be")
    return _Said(place.path, f"{must}, {shown}", None)


def first_line(error: Exception) -> str:
    """Return the first line of an error, without the values that it dumps after it.

    >>> first_line(ValueError("Block strategy requires block structure\\nnum_bits=8 type=..."))
    'Block strategy requires block structure'
    """
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def got(value: Any) -> str:
    shown = repr(value)
    return f"got {shown if len(shown) <= 60 else f'{shown[:57]}...'}"
