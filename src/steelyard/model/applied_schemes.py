"""Applies a quantization config to the modules of a model."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
from compressed_tensors.utils.match import is_match
from torch.nn import Embedding, Linear, Module

from steelyard.model.module_names import targets_for

__all__ = ["apply_schemes"]


def apply_schemes(
    model: Module, config: QuantizationConfig, groups: Mapping[str, str] | None = None
) -> None:
    """Attach schemes and empty quantization parameters to modules, without a progress bar.

    groups: module -> the config group that quantizes it; None where the targets have its names
    """
    quiet = "show_progress" in inspect.signature(apply_quantization_config).parameters
    options: dict[str, Any] = {"show_progress": False} if quiet else {}
    apply_quantization_config(model, _by_own_names(model, config, groups or {}), **options)


def _by_own_names(
    model: Module, config: QuantizationConfig, groups: Mapping[str, str]
) -> QuantizationConfig:
    """Return a config whose targets match by the model's names, not those of its files."""
    modules = {n: m for n, m in model.named_modules() if isinstance(m, (Linear, Embedding))}
    schemes = {}
    for group, scheme in config.config_groups.items():
        members = [name for name, own in groups.items() if own == group]
        named, loose = set(scheme.targets), [t for t in scheme.targets if t not in modules]
        if not all(n in named or is_match(n, modules[n], loose) for n in members):
            others = [name for name in modules if groups.get(name) != group]
            scheme = scheme.model_copy(update={"targets": targets_for(members, others)})
        schemes[group] = scheme
    return config.model_copy(update={"config_groups": schemes})
