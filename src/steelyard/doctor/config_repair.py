"""Corrects a quantization_config by the tensors that it describes."""

from __future__ import annotations

import copy
import re
from collections.abc import Collection, Iterator
from typing import Any

import compressed_tensors
from compressed_tensors.base import QUANTIZATION_METHOD
from compressed_tensors.quantization import QuantizationConfig
from compressed_tensors.utils.match import match_name

from steelyard.checkpoint.patterns import PREFIX
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.doctor.implied import Implied, implied_by
from steelyard.doctor.vllm_rules import Unservable, VllmConfig, lookups, vllm_layers
from steelyard.foreign import show
from steelyard.formats import DENSE
from steelyard.formats.table import overall_format
from steelyard.formats.tensor_names import WEIGHT, is_parameter
from steelyard.words import count

__all__ = ["repaired_fields", "repaired_groups"]

Raw = dict[str, Any]


def repaired_fields(raw: Raw) -> tuple[Raw, list[str]]:
    """Return a quantization_config with its fixed fields corrected, and what was changed."""
    raw, changes = copy.deepcopy(raw), []
    wanted = {"quant_method": QUANTIZATION_METHOD, "quantization_status": "compressed"}
    if not re.match(r"\d+\.\d+", str(raw.get("version", "0.0"))):
        wanted["version"] = compressed_tensors.__version__
    for name, value in wanted.items():
        if raw.get(name) != value:
            changes.append(f"{name}: {show(raw.get(name))} -> {value!r}")
            raw[name] = value
    return raw, changes


def repaired_groups(written: WrittenCheckpoint) -> tuple[Raw, list[str]]:
    """Return a quantization_config whose groups, targets and ignore fit the tensors."""
    raw: Raw = copy.deepcopy(written.config["quantization_config"])
    changes: list[str] = []
    coded = {m for m, leaves in written.tensors.items() if any(map(is_parameter, leaves))}
    raw["ignore"] = _ignore(written, coded, changes)
    found = {module: _implied(written, module) for module in coded}
    groups = raw["config_groups"]
    for name, scheme in written.quantization.config_groups.items():
        kind = _common({found[m] for m in coded if _is_of(written, m, name)})
        if kind is None or scheme.weights is None:
            continue
        for key, value in kind.differs(scheme.weights).items():
            old = getattr(scheme.weights, key)
            changes.append(f"config_groups.{name}.weights.{key}: {show(old)} -> {value!r}")
            groups[name]["weights"][key] = value
        dynamic = {key for key, _ in kind.args}
        if "group_size" not in dynamic and groups[name]["weights"].get("group_size"):
            groups[name]["weights"]["group_size"] = None
        overall = raw.get("format")
        if (groups[name].get("format") or overall) != kind.format:
            changes.append(f"config_groups.{name}.format: {show(overall)} -> {kind.format!r}")
            groups[name]["format"] = kind.format
    formats = {group.get("format") or raw.get("format") or DENSE for group in groups.values()}
    if all(group.get("format") for group in groups.values()):
        raw["format"] = overall_format(formats)
    _target(raw, written, found, changes)
    return raw, changes


def _common(kinds: set[Implied | None]) -> Implied | None:
    """Return what all modules of a config group imply; None if they differ.

    A single group in a row looks like a channel.
    """
    known = {kind for kind in kinds if kind is not None}
    grouped = {kind for kind in known if ("strategy", "group") in kind.args}
    known = grouped if len(grouped) == 1 else known
    return known.pop() if len(known) == 1 else None


def _implied(written: WrittenCheckpoint, module: str) -> Implied | None:
    infos = {n: written.shards.info(f"{module}.{n}") for n in written.tensors[module]}
    scheme = written.targeted(module)
    args = None if scheme is None else scheme.weights
    return implied_by(infos, args, lambda leaf: written.shards.read(f"{module}.{leaf}"))


def _is_of(written: WrittenCheckpoint, module: str, group: str) -> bool:
    scheme = written.targeted(module)
    wanted = written.quantization.config_groups[group]
    return scheme is not None and scheme.targets == wanted.targets


def _ignore(written: WrittenCheckpoint, coded: Collection[str], changes: list[str]) -> list[str]:
    """Return the entries of `ignore`, without modules that hold codes, with those that do not."""
    plain = [m for m, leaves in written.tensors.items() if m not in coded and WEIGHT in leaves]
    kept: list[str] = []
    for entry in written.quantization.ignore or ():
        hidden = [m for m in coded if match_name(m, entry)]
        if not hidden:
            kept.append(entry)
            continue
        changes.append(f"ignore: {entry!r} removed, since {min(hidden)} holds codes")
        if entry.startswith(PREFIX):
            kept += [m for m in plain if match_name(m, entry)]
    named = [m for m in plain if m in written.schemes and m not in kept]
    if named:
        changes.append(
            f"ignore: {count(len(named), 'module')} added, such as {named[0]}, which holds no codes"
        )
    return [*kept, *named]


def _target(
    raw: Raw,
    written: WrittenCheckpoint,
    found: dict[str, Implied | None],
    changes: list[str],
) -> None:
    """Add targets for modules with codes that neither compressed-tensors nor vLLM would find."""
    homeless = [m for m in found if written.targeted(m) is None]
    for module in homeless:
        fitting = [
            name for name, group in raw["config_groups"].items() if _fits(group, found[module])
        ]
        if len(fitting) == 1:
            raw["config_groups"][fitting[0]]["targets"].append(module)
            changes.append(f"config_groups.{fitting[0]}.targets: {module!r} added")
    config = QuantizationConfig.model_validate(raw)
    for name, targets in _unseen(written, config, set(found)):
        group = raw["config_groups"][name]
        group["targets"] = [*targets, *group["targets"]]
        changes.append(f"config_groups.{name}.targets: {targets[0]!r} added, where vLLM looks")


def _fits(group: Raw, kind: Implied | None) -> bool:
    if kind is None:
        return False
    args = QuantizationConfig.model_validate({"config_groups": {"g": group}}).config_groups["g"]
    return args.weights is not None and not kind.differs(args.weights)


def _unseen(
    written: WrittenCheckpoint, config: QuantizationConfig, coded: Collection[str]
) -> Iterator[tuple[str, list[str]]]:
    """Yield config groups with the names of layers that vLLM would read under another scheme."""
    rules = VllmConfig(config)
    for layer in vllm_layers(m for m in written.tensors if m in coded):
        mine = {
            name
            for name in config.config_groups
            for part in layer.parts
            if _is_of(written, part, name)
        }
        try:
            seen = rules.scheme_of(layer)
        except Unservable:
            continue
        if len(mine) == 1 and seen is not config.config_groups[(group := mine.pop())]:
            yield group, lookups(layer)
