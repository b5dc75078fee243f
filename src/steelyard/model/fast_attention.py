"""Replaces transformers' attention function by the compiled one while a model is calibrated."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import Module

from steelyard.kernels.masked_attention import attention
from steelyard.model.precision import multiplies_in_bf16

__all__ = ["fast_attention"]

_NAME = "sdpa"
_ELSEWHERE = ("position_bias", "softcap", "s_aux", "cache")  # arguments that change the result


@contextlib.contextmanager
def fast_attention() -> Iterator[None]:
    """Compute attention in the compiled kernel inside the context, where it can.

    It can where states are bf16, or fp32 in a block whose layers multiply in bf16. Modules that
    ask for another function than torch's keep theirs.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    before: Callable[..., tuple[torch.Tensor, torch.Tensor | None]]
    before = ALL_ATTENTION_FUNCTIONS[_NAME]

    def function(
        module: Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        dropout: float = 0.0,
        scaling: float | None = None,
        is_causal: bool | None = None,
        **more: Any,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        narrow = query.dtype == torch.bfloat16 or multiplies_in_bf16(module)
        other = dropout > 0 or any(more.get(name) is not None for name in _ELSEWHERE)
        wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
        if narrow and not other and not wanted:
            found = attention(query, key, value, attention_mask, causal, scaling)
            if found is not None:
                return found, None
        given = (query, key, value, attention_mask)
        return before(module, *given, dropout=dropout, scaling=scaling, is_causal=is_causal, **more)

    ALL_ATTENTION_FUNCTIONS.register(_NAME, function)
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS.register(_NAME, before)
