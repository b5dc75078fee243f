"""Builds the config.json of a quantized checkpoint."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from compressed_tensors.base import TRANSFORM_CONFIG_NAME
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.utils.match import is_match, match_name, match_targets
from torch.nn import Embedding, Linear

from steelyard.checkpoint import quantization_config_dict
from steelyard.checkpoint.written import likely_class
from steelyard.formats import format_of
from steelyard.formats.served_rotation import transform_config
from steelyard.formats.table import overall_format
from steelyard.fusion import expert_groups, fused_groups
from steelyard.model.attention import implied_cache_scheme
from steelyard.model.inputs import output_head
from steelyard.model.matching import by_all_names
from steelyard.model.module_names import targets_for
from steelyard.model.source import Source
from steelyard.plan.plan import Plan

__all__ = ["written_config"]


def written_config(
    source: Source,
    config: QuantizationConfig,
    plan: Plan,
    plain: Iterable[str],
    format: str | None = None,
) -> dict[str, Any]:
    """Return the content of config.json: that of the source, plus quantization_config.

    plain:  the matrices that are written unquantized, by their names in the files
    format: format of all quantized weights; None uses that of each scheme
    """
    heads = _head_targets(source, plan)
    groups = {}
    for name, scheme in config.config_groups.items():
        own = _found_targets(source, plan, name, scheme.targets)
        targets = list(dict.fromkeys([*heads.get(name, ()), *own]))
        update = {"format": _format_of(scheme, format), "targets": targets}
        groups[name] = scheme.model_copy(update=update)
    written = config.model_copy(
        update={
            "config_groups": groups,
            "kv_cache_scheme": implied_cache_scheme(source.model, config),
            "ignore": list(dict.fromkeys(_ignored(source, config, plan, plain))),
            "quantization_status": QuantizationStatus.COMPRESSED,
            "format": overall_format({str(scheme.format) for scheme in groups.values()}),
        }
    )
    content = quantization_config_dict(written)
    content[TRANSFORM_CONFIG_NAME] = transform_config(plan.served)
    return {**source.config(), "quantization_config": content}


def _head_targets(source: Source, plan: Plan) -> dict[str, list[str]]:
    """Return config group -> targets by which a server finds the head that it quantizes.

    vLLM's class of heads is no Linear, and in a model with a tower its head has another name.
    """
    head = output_head(source.model)
    planned = next((p for p in plan.quantized if p.name == head), None)
    if head is None or planned is None:
        return {}
    leaf, targets = head.rpartition(".")[2], planned.scheme.targets
    nested = isinstance(source.config().get("text_config"), dict)
    served = f"language_model.{leaf}" if nested else head
    if any(match_name(served, target) for target in targets):
        return {}
    names = [source.module_key(head), source.class_name(head)]
    pattern = f"re:.*{re.escape(leaf)}$"
    others = [name for name in by_all_names(source.model) if name not in (head, *names)]
    ambiguous = any(match_name(other, pattern) for other in others)
    return {planned.group: list(dict.fromkeys(names)) if ambiguous else [pattern]}


def _found_targets(source: Source, plan: Plan, group: str, targets: list[str]) -> list[str]:
    """Return the targets of a config group, with more where they match only other names.

    vLLM has the names of the files, transformers those of the class.
    """
    modules = dict(source.model.named_modules())
    members = [planned.name for planned in plan.quantized if planned.group == group]
    others = modules.keys() - set(members)
    found = list(targets)
    if len(plan.config.config_groups) > 1 and _hides_fused(plan, members):
        found = [t for t in targets if t in modules or t.startswith("re:")]
    for naming in (source.module_key, source.class_name):
        exact, loose = set(found), [t for t in found if t not in modules]
        pairs = [(naming(name), modules[name]) for name in members]
        missing = [n for n, m in pairs if n not in exact and not is_match(n, m, loose)]
        if missing:
            found += targets_for(sorted(missing), {naming(name) for name in others})
    return found


def _hides_fused(plan: Plan, members: list[str]) -> bool:
    """Whether a class as the target of these modules would hide fused layers of other groups.

    vLLM looks for the name of a fused layer, such as qkv_proj, then for its class, and for its
    parts only after that. So beside other groups a class is replaced by names; not for experts,
    which vLLM finds by their class alone where their names are its own.
    """
    within = set(members)
    others = [p.name for p in plan.quantized if p.name not in within]
    return bool(fused_groups(others)) and not expert_groups(members)


def _ignored(
    source: Source, config: QuantizationConfig, plan: Plan, plain: Iterable[str]
) -> Iterator[str]:
    """Name every matrix that is not quantized: a server matches classes, and has its own.

    Experts that transformers stacks are Linear layers there; so is a tied head, which is in no
    file.
    """
    quantized = {source.class_name(planned.name) for planned in plan.quantized}
    yield from (pattern for pattern in config.ignore if pattern not in quantized)
    modules = dict(source.model.named_modules())
    names: dict[str, str] = {}
    for name in modules:  # the first of tied ones: the embedding, not the head
        names.setdefault(source.module_key(name), name)
    for name in sorted(plain):
        module = modules[names[name]] if name in names else None
        embeds = isinstance(module, Embedding) and likely_class(name) == "Embedding"
        if not embeds and not any(match_name(name, pattern) for pattern in config.ignore):
            yield name
    targets = [target for scheme in config.config_groups.values() for target in scheme.targets]
    for name, module in source.class_modules().items():
        if not isinstance(module, (Linear, Embedding)) or name in quantized:
            continue
        if match_targets(name, module, targets) and not is_match(name, module, config.ignore):
            yield name


def _format_of(scheme: QuantizationScheme, chosen: str | None) -> str:
    return (chosen if scheme.weights is not None else None) or format_of(scheme)
