"""Which modules a recipe's targets and ignores stand for.

A module that is read from files may have another name there than in its class: both count. In
`ignore`, `lm_head` stands for the output head, whatever the class calls it, unless a target names
that module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressed_tensors.utils.match import is_match, match_name, match_targets
from torch.nn import Module

__all__ = ["HEAD", "by_all_names", "hits_of", "ignoring", "matches"]

HEAD = "lm_head"


def matches(model: Any, name: str, module: Module, pattern: str) -> bool:
    """Whether a target or an ignore stands for a module."""
    return any(is_match(each, module, pattern) for each in _names(model, name))


def by_all_names(model: Any) -> dict[str, Module]:
    """Return the modules of a model by each name that they have."""
    modules = dict(model.named_modules())
    others = getattr(model, "class_names", {}).items()
    return {**modules, **{own: modules[name] for name, own in others}}


def hits_of(model: Any, name: str, module: Module, targets: Sequence[str]) -> list[str]:
    """Return the targets that stand for a module, those that name it before those of its class."""
    names = _names(model, name)
    hits = [hit for each in names for hit in match_targets(each, module, list(targets))]
    return sorted(dict.fromkeys(hits), key=lambda hit: not _names_it(names, hit))


def ignoring(
    model: Any, name: str, module: Module, ignore: Sequence[str], hits: Sequence[str]
) -> str | None:
    """Return the ignore that stands for a module; None if there is none.

    hits: the targets that do
    """
    others = [pattern for pattern in ignore if pattern != HEAD or name == HEAD]
    found = next((pattern for pattern in others if matches(model, name, module, pattern)), None)
    if found is None and HEAD in ignore and name:
        names = _names(model, name)
        named = any(_names_it(names, hit) for hit in hits)
        return HEAD if not named and (HEAD in names or module is _head_of(model)) else None
    return found


def _names(model: Any, name: str) -> tuple[str, ...]:
    other = getattr(model, "class_names", {}).get(name)
    return (name,) if other in (None, name) else (name, other)


def _names_it(names: Sequence[str], target: str) -> bool:
    return any(match_name(name, target) for name in names)


def _head_of(model: Any) -> Module | None:
    """Return the output head; None for a model that has none, or does not tell."""
    try:
        head: Module | None = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head
