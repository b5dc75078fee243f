"""Gives some modules of a recipe other schemes, as config groups that name them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from steelyard.modifiers import QuantizationModifier
from steelyard.modifiers.modifier import Modifier

__all__ = ["name_patterns", "with_schemes"]

_REPLACED = ("scheme", "group_size", "num_bits", "config_groups", "weights", "targets", "ignore")
_OBSERVERS = (
    "observer",
    "weight_observer",
    "input_observer",
    "output_observer",
    "activation_observer",
)


def name_patterns(names: Iterable[str]) -> list[str]:
    """Return expressions that match these modules and, of the same kinds, no others.

    Modules that differ in the number of their layer share one. The numbers of experts are left
    open, since a server gives all experts of a layer one scheme.

    >>> print(*name_patterns(["layers.0.up", "layers.12.up", "layers.0.experts.1.down", "head"]))
    re:layers\\.(0|12)\\.up$ re:layers\\.(0)\\.experts\\.\\d+\\.down$ re:head$
    """
    layers: dict[tuple[str, str], dict[str, None]] = {}
    for name in names:
        parts = name.split(".")
        at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
        rest = [r"\d+" if part.isdecimal() else re.escape(part) for part in parts[at + 1 :]]
        key = (r"\.".join(map(re.escape, parts[:at])), r"\.".join(rest))
        layers.setdefault(key, {}).update(dict.fromkeys(parts[at : at + 1]))
    found = []
    for (before, after), numbers in layers.items():
        which = f"({'|'.join(numbers)})" if numbers else ""
        found.append("re:" + r"\.".join(part for part in (before, which, after) if part) + "$")
    return found


def with_schemes(
    modifiers: Sequence[Modifier],
    schemes: Mapping[str, Sequence[str]],
    groups: Mapping[str, QuantizationScheme],
    ignore: Sequence[str] = (),
) -> list[Modifier]:
    """Return modifiers whose quantizing one has more config groups, before its own.

    schemes: name of a group -> its modules
    groups:  name of a group -> its scheme
    ignore:  further modules that are not quantized
    """
    found: list[Modifier] = []
    for modifier in modifiers:
        config = modifier.quantization_config()
        if config is None or not isinstance(modifier, QuantizationModifier):
            found.append(modifier)
            continue
        options: dict[str, Any] = {
            name: getattr(modifier, name)
            for name in modifier.model_fields_set
            if name not in (*_REPLACED, *_OBSERVERS)
        }
        own = {name: _plain(scheme) for name, scheme in config.config_groups.items()}
        more = {
            name: _plain(groups[name], name_patterns(members)) for name, members in schemes.items()
        }
        options["config_groups"] = {**more, **own}
        options["ignore"] = [*config.ignore, *name_patterns(ignore)]
        found.append(type(modifier)(**options))
    return found


def _plain(scheme: QuantizationScheme, targets: list[str] | None = None) -> dict[str, Any]:
    content = scheme.model_dump(exclude={"format"}, exclude_none=True)
    return {**content, "targets": targets or list(scheme.targets)}
