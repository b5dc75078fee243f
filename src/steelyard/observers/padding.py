"""Keeps padding out of statistics.

A padded batch runs under `without_padding(mask)`; observers and hooks use the `real_tokens` of an
activation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

__all__ = ["padding_mask", "real_tokens", "without_padding"]

_mask: ContextVar[torch.Tensor | None] = ContextVar("padding", default=None)


@contextmanager
def without_padding(mask: torch.Tensor | None) -> Iterator[None]:
    """Keep tokens where `mask` is 0 out of every statistic.

    mask: (batch, seq), the tokenizer's `attention_mask`
    """
    if mask is not None and bool(mask.all()):
        mask = None
    token = _mask.set(None if mask is None else mask.bool())
    try:
        yield
    finally:
        _mask.reset(token)


def padding_mask() -> torch.Tensor | None:
    """Return the mask of the current batch, True for real tokens; None if all are."""
    return _mask.get()


def real_tokens(value: torch.Tensor, base_name: str) -> torch.Tensor:
    """Return `value` without its padding; unchanged outside of `without_padding`.

    (batch, seq, hidden) and (batch * seq, hidden) become (tokens, hidden); attention states
    (batch, heads, seq, head_dim) become (1, heads, tokens, head_dim).
    """
    mask = _mask.get()
    if mask is None:
        return value
    mask = mask.to(value.device)
    if base_name in ("q", "k", "v"):  # (batch, heads, seq, head_dim)
        if value.shape[0] == mask.shape[0] and value.shape[2] == mask.shape[1]:
            return value.transpose(1, 2)[mask].transpose(0, 1).unsqueeze(0)
    elif value.shape[:2] == mask.shape:
        return value[mask]
    elif value.shape[0] == mask.numel():  # tokens of all samples in one row
        return value[mask.flatten()]
    raise ValueError(
        f"a tensor of shape {tuple(value.shape)} does not match the padding mask "
        f"{tuple(mask.shape)}; calibrate without padding"
    )
