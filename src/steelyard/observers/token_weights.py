"""The weights of tokens in the error of a layer: each counts relative to its hidden state.

What a layer adds to a hidden state is next read through a norm, which divides each token by its
size. An error that is small beside the token is lost there. So a token's squared error counts
divided by the mean square of its hidden state, at most four times as much as that of the median
token. Without this, the few tokens with huge hidden states that many models have (often the first
of a sample) decide how all others are rounded.

A layer runs under `hidden_state(x)`; hooks use the `token_weights` of the current batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from steelyard.observers.padding import padding_mask, real_tokens

__all__ = ["current_hidden_state", "hidden_state", "token_weights"]

_MOST = 4.0  # of a token, beside the median one

_hidden: ContextVar[torch.Tensor | None] = ContextVar("hidden", default=None)


@contextmanager
def hidden_state(hidden: torch.Tensor | None) -> Iterator[None]:
    """Weigh tokens by this hidden state, (batch, seq, features); None to weigh all alike."""
    token = _hidden.set(hidden)
    try:
        yield
    finally:
        _hidden.reset(token)


def current_hidden_state() -> torch.Tensor | None:
    return _hidden.get()


def token_weights() -> torch.Tensor | None:
    """Return the weights of the current batch's real tokens, (tokens,); None outside of a layer.

    Their mean is 1 in each sample, so it does not matter how samples are batched.
    """
    hidden = _hidden.get()
    if hidden is None or hidden.ndim != 3:
        return None
    squares = hidden.detach().float().square().mean(-1)  # (batch, seq)
    mask = padding_mask()
    if mask is not None:
        squares = squares.masked_fill(~mask.to(squares.device), torch.nan)
    median = squares.nanmedian(-1, keepdim=True).values
    least = (median / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
    weights = squares.clamp(min=least).reciprocal()
    weights = weights / weights.nanmean(-1, keepdim=True)
    return real_tokens(weights[..., None], "input").flatten()
