"""Attention modules: which can be quantized, and the KV cache scheme that they imply."""

from __future__ import annotations

from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from compressed_tensors.quantization.lifecycle import initialize
from compressed_tensors.utils.match import is_match, is_narrow_match, match_targets
from torch.nn import Module

__all__ = ["attention_group", "cached_attention", "implied_cache_scheme"]


def cached_attention(model: Module) -> dict[str, Module]:
    """Return the attention modules whose states compressed-tensors can quantize, by name."""
    name_now, name_before = "is_cached_attention_module", "is_attention_module"
    known = getattr(initialize, name_now, None) or getattr(initialize, name_before)
    return {name: module for name, module in model.named_modules() if known(module)}


def attention_group(
    model: Any, config: QuantizationConfig, name: str, module: Module
) -> str | None:
    """Return the config group that quantizes the states of an attention module.

    The target must match that module itself, not its parents or children.
    """
    groups = {t: group for group, s in config.config_groups.items() for t in s.targets}
    if not groups or is_match(name, module, config.ignore):
        return None
    hits = match_targets(name, module, list(groups))
    if not hits:
        return None
    group = groups[hits[0]]
    narrow = is_narrow_match(model, config.config_groups[group].targets, name)
    return group if narrow else None


def implied_cache_scheme(model: Any, config: QuantizationConfig) -> QuantizationArgs | None:
    """Return the config's `kv_cache_scheme`, or the scheme that all attention modules share.

    A server reads its cache scheme from `kv_cache_scheme` alone and applies it to every attention
    module. Return None if some modules have no scheme, or a different one: they have no scales.
    """
    if config.kv_cache_scheme is not None:
        return config.kv_cache_scheme
    found: list[QuantizationArgs | None] = []
    for name, module in cached_attention(model).items():
        group = attention_group(model, config, name, module)
        found.append(None if group is None else config.config_groups[group].input_activations)
    alike = found and all(args == found[0] for args in found)
    return found[0] if alike else None
