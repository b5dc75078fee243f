"""Matches a recipe's targets and ignores with modules.

A module may have one name in the files and another in its class: both match. In `ignore`, `lm_head`
matches the output head, whatever the class calls it, unless a target names that module.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from compressed_tensors.utils.match import is_match, match_name, match_targets
from torch.nn import Module

__all__ = [
    "HEAD",
    "by_all_names",
    "is_named",
    "is_router",
    "matches",
    "matching_ignore",
    "matching_targets",
    "name_as_files",
]

HEAD = "lm_head"
_ROUTER = re.compile(r"(^|\.)(gate|router|wg|shared_expert_gate)$|(^|\.)router\.")


def is_router(name: str) -> bool:
    """Whether a module routes tokens to experts: small, and sensitive to quantization."""
    return _ROUTER.search(name) is not None


def is_named(model: Any, name: str, targets: Sequence[str]) -> bool:
    """Whether one of the targets matches the name of a module, not only its class."""
    return any(_names_it(_names(model, name), target) for target in targets)


def matches(model: Any, name: str, module: Module, pattern: str) -> bool:
    """Whether a target or an ignore matches a module."""
    return any(is_match(each, module, pattern) for each in _names(model, name))


def by_all_names(model: Any) -> dict[str, Module]:
    """Return the modules of a model under each of their names."""
    modules = dict(model.named_modules())
    others = getattr(model, "other_names", {}).items()
    return {**modules, **{new: modules[own] for own, new in others if own in modules}}


def name_as_files(model: Any, keys: Mapping[str, str]) -> None:
    """Let targets and ignores match the modules of a model by their names in the files as well.

    keys: tensor of the model -> its name in the files
    """
    weights = {own: name for own, name in keys.items() if own.endswith(".weight")}
    model.other_names = {
        own.removesuffix(".weight"): name.removesuffix(".weight")
        for own, name in weights.items()
        if own != name and name.endswith(".weight")
    }


def matching_targets(model: Any, name: str, module: Module, targets: Sequence[str]) -> list[str]:
    """Return the targets that match a module, by name first, then by class."""
    names = _names(model, name)
    hits = [hit for each in names for hit in match_targets(each, module, list(targets))]
    return sorted(dict.fromkeys(hits), key=lambda hit: not _names_it(names, hit))


def matching_ignore(
    model: Any, name: str, module: Module, ignore: Sequence[str], hits: Sequence[str]
) -> str | None:
    """Return the ignore that matches a module; None if there is none.

    hits: the targets that match it
    """
    others = [pattern for pattern in ignore if pattern != HEAD or name == HEAD]
    found = next((pattern for pattern in others if matches(model, name, module, pattern)), None)
    if found is None and HEAD in ignore and name:
        names = _names(model, name)
        named = any(_names_it(names, hit) for hit in hits)
        return HEAD if not named and (HEAD in names or module is _head_of(model)) else None
    return found


def _names(model: Any, name: str) -> tuple[str, ...]:
    other = getattr(model, "other_names", {}).get(name)
    return (name,) if other in (None, name) else (name, other)


def _names_it(names: Sequence[str], target: str) -> bool:
    return any(match_name(name, target) for name in names)


def _head_of(model: Any) -> Module | None:
    """Return the output head; None if the model has none or does not name it."""
    try:
        head: Module | None = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return head
