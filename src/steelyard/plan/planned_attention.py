"""The attention modules whose states a recipe quantizes, and the modifier that does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from compressed_tensors.quantization import QuantizationConfig

from steelyard.model.attention import attention_group, cached_attention
from steelyard.plan.claims import Claim

__all__ = ["attention_modifier", "attention_modules"]


def attention_modifier(claims: Sequence[Claim]) -> int:
    """Return the index of the modifier that quantizes attention states."""
    caching = [c for c in claims if c.config.kv_cache_scheme is not None]
    targeting = [
        c
        for c in claims
        for scheme in c.groups.values()
        if scheme.weights is None and scheme.input_activations is not None
    ]
    return next((c.modifier for c in [*caching, *targeting, *claims]), 0)


def attention_modules(model: Any, config: QuantizationConfig) -> list[str]:
    """Return the names of attention modules with quantized states."""
    return [
        name
        for name, module in cached_attention(model).items()
        if config.kv_cache_scheme is not None
        or attention_group(model, config, name, module) is not None
    ]
