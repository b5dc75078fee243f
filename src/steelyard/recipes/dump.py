"""Writes modifiers as YAML that loads to equal ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import yaml
from pydantic import BaseModel

from steelyard.errors import RecipeError
from steelyard.modifiers import Modifier
from steelyard.recipes.yaml_text import add_numbers

__all__ = ["dump_modifiers"]


class _Dumper(yaml.SafeDumper):
    """The safe dumper, without aliases; quotes text like 1e3."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


add_numbers(_Dumper)


def dump_modifiers(modifiers: Sequence[Modifier]) -> str:
    """Return a recipe of one stage that loads to equal modifiers."""
    named = [(_name(modifier), _plain(modifier, _name(modifier))) for modifier in modifiers]
    group: Any = dict(named)
    if len(group) < len(named):  # a name occurs twice, which a mapping cannot hold
        group = [{name: options} for name, options in named]
    stage = {"quantization_stage": {"quantization_modifiers": group}}
    return str(yaml.dump(stage, Dumper=_Dumper, sort_keys=False))


def _name(modifier: Modifier) -> str:
    kind = type(modifier)
    names: list[str] = [kind.__name__, *Modifier.registry]
    for name in names:
        if name in Modifier.registry and Modifier.registry.get(name) is kind:
            return name
    raise RecipeError(
        f"{kind.__name__} is not registered, so a recipe cannot name it: decorate it with "
        f'@Modifier.register("{kind.__name__}")'
    )


def _plain(value: Any, path: str) -> Any:
    if isinstance(value, BaseModel):
        return {name: _plain(v, f"{path}.{name}") for name, v in _stated(value).items()}
    if isinstance(value, Mapping):
        return {key: _plain(v, f"{path}.{key}") for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v, f"{path}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value)
    if value is None or type(value) in (bool, int, float, str):
        return value
    raise RecipeError(f"{path}: a {type(value).__name__} cannot be written into a recipe")


def _stated(model: BaseModel) -> dict[str, Any]:
    """Return the fields that were set, and lists that may have been changed in place.

    compressed-tensors' own serializer omits some fields that were set. Fields that a validator
    filled in are omitted here: the next validator fills them in again.
    """
    stated = {}
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        changed = value != field.get_default(call_default_factory=True, validated_data={})
        if changed and (name in model.model_fields_set or field.default_factory is not None):
            stated[name] = value
    return stated
