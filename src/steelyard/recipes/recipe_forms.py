"""Finds the modifiers in the forms that a recipe may have.

The forms are a flat list or mapping of modifiers, the same under `modifiers:`, and stages::

    quantization_stage:
      quantization_modifiers:
        QuantizationModifier: {scheme: W4A16}
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from steelyard.modifiers import Modifier
from steelyard.modifiers.locate import KeyPath, Problem
from steelyard.modifiers.not_implemented import NOT_IMPLEMENTED, not_implemented

__all__ = ["RecipeEntry", "entries_of", "is_stage", "modifier_names"]


ALIKE = 0.85  # of the letters of two names, so that one is a misspelling of the other


class RecipeEntry(NamedTuple):
    """A modifier of a recipe, with unchecked options."""

    path: KeyPath
    modifier: type[Modifier] | Modifier
    options: Mapping[Any, Any]


def entries_of(recipe: Any) -> Iterator[RecipeEntry | Problem]:
    """Yield the modifiers of a recipe in order, and a problem for each invalid item."""
    if not isinstance(recipe, Mapping) or not recipe:
        yield from _modifiers(recipe, ())
        return
    for key, value in recipe.items():
        if key == "modifiers":
            yield from _modifiers(value, (key,))
        elif isinstance(key, str) and is_stage(key):
            yield from _stage(value, (key,))
        else:
            yield _entry(key, value, (key,), " (or a key that ends in _stage)")


def is_stage(key: str) -> bool:
    """Whether a key names a stage; llm-compressor numbers those of recipes that it merges.

    >>> is_stage("quantization_stage"), is_stage("default_stage_1"), is_stage("modifiers")
    (True, True, False)
    """
    return re.fullmatch(r".*_stage(_\d+)?", key) is not None


def _stage(stage: Any, path: KeyPath) -> Iterator[RecipeEntry | Problem]:
    if not isinstance(stage, Mapping) or not stage:
        yield path, f"a stage is a mapping with the key modifiers, got {_kind(stage)}"
        return
    for key, value in stage.items():
        if isinstance(key, str) and (key == "modifiers" or key.endswith("_modifiers")):
            yield from _modifiers(value, (*path, key))
        else:
            yield (
                (*path, key),
                f"unknown key {key!r}: the keys of a stage end in _modifiers",
            )


def _modifiers(group: Any, path: KeyPath) -> Iterator[RecipeEntry | Problem]:
    if not isinstance(group, (Mapping, list, tuple)) or not group:
        yield path, f"modifiers are a list, or a mapping of names to options, got {_kind(group)}"
    elif isinstance(group, Mapping):
        for name, options in group.items():
            yield _entry(name, options, (*path, name))
    else:
        for i, item in enumerate(group):
            yield _item(item, (*path, i))


def _item(item: Any, path: KeyPath) -> RecipeEntry | Problem:
    if isinstance(item, Modifier):
        return RecipeEntry(path, item, {})
    if isinstance(item, Mapping) and len(item) == 1:
        ((name, options),) = item.items()
        return _entry(name, options, (*path, name))
    if isinstance(item, str) and item in Modifier.registry:
        return path, f"write `{item}: {{}}` for a modifier without options"
    if isinstance(item, Mapping):
        return path, f"write one modifier per item, `Name: {{options}}`, got {len(item)} keys"
    return path, wrong_object(item)


def _entry(name: Any, options: Any, path: KeyPath, also: str = "") -> RecipeEntry | Problem:
    if isinstance(name, str) and name in NOT_IMPLEMENTED:
        return path, not_implemented(name)
    if not isinstance(name, str) or name not in Modifier.registry:
        return path, f"unknown modifier {name!r}: {_meant(str(name))}{also}"
    if options is None:  # `Name:` without a value
        options = {}
    if not isinstance(options, Mapping):
        return path, f"the options of a modifier are a mapping, got {_kind(options)}"
    return RecipeEntry(path, Modifier.registry.get(name), options)


def _meant(name: str) -> str:
    """Return the modifier of which `name` is a misspelling, or all of them.

    Names that are only similar say nothing: AWQModifier is no misspelling of GPTQModifier.
    """
    known = modifier_names()
    stem = _stem(name)
    for other in (*known, *NOT_IMPLEMENTED):
        alike = difflib.SequenceMatcher(None, stem, _stem(other)).ratio() >= ALIKE
        if alike or sorted(stem) == sorted(_stem(other)):
            missing = "" if other in known else f" {not_implemented(other)}"
            return f"did you mean {other!r}?{missing}"
    return f"known: {', '.join(sorted(known))}"


def _stem(name: str) -> str:
    """
    >>> _stem("GPTQModifier"), _stem("QuantizationModifer")
    ('gptq', 'quantization')
    """
    return re.sub("mod[ifer]*$", "", name.lower())


def modifier_names() -> list[str]:
    """Return the names of all modifiers, as written in a recipe."""
    return [Modifier.registry.get(name).__name__ for name in Modifier.registry]


def wrong_object(item: Any) -> str:
    """Return why a Python object is not a modifier, and what to do."""
    kind = item if isinstance(item, type) else type(item)
    if kind.__module__.split(".")[0] == "llmcompressor":
        if kind.__name__ in modifier_names():
            remedy = f"write `from steelyard.modifiers import {kind.__name__}`"
        elif kind.__name__ in NOT_IMPLEMENTED:
            remedy = not_implemented(kind.__name__)
        else:
            remedy = f"steelyard has {', '.join(modifier_names())}"
        return f"{kind.__name__} comes from {kind.__module__}: {remedy}"
    if isinstance(item, type) and issubclass(item, Modifier):
        return f"{item.__name__} is a class: call it with its options, {item.__name__}(...)"
    return f"a modifier is a mapping `Name: {{options}}` or an object, got {_kind(item)}"


def _kind(value: Any) -> str:
    if value is None:
        return "nothing"
    if isinstance(value, (Mapping, list, tuple)):
        kind = "mapping" if isinstance(value, Mapping) else "list"
        return f"a {kind}" if value else f"an empty {kind}"
    shown = repr(value)
    return shown if len(shown) <= 60 else f"{shown[:57]}..."
