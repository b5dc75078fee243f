"""The weights of tokens in the error of a layer: each counts relative to its hidden state.

What a layer adds to a hidden state is next read through a norm, which divides each token by its
size. An error that is small beside the token is lost there. So a token's squared error counts
divided by the mean square of its hidden state, at most four times as much as that of the median
token. Without this, the few tokens with huge hidden states that many models have (often the first
of a sample) decide how all others are rounded.

A layer runs under `hidden_state(x)`; hooks use the `token_weights` of the current batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from steelyard.observers.padding import padding_mask, real_tokens

__all__ = ["hidden_state", "joined_weights", "token_weights"]

_MOST = 4.0  # of a token, beside the median one

_squares: ContextVar[torch.Tensor | None] = ContextVar("squares", default=None)
_joined: ContextVar[torch.Tensor | None] = ContextVar("joined", default=None)


@contextmanager
def hidden_state(hidden: torch.Tensor) -> Iterator[None]:
    """Weigh tokens by this hidden state, (batch, seq, features); only its sizes are kept."""
    squares = None
    if hidden.ndim == 3:
        wide = torch.promote_types(hidden.dtype, torch.float32)
        sizes = torch.linalg.vector_norm(hidden.detach(), dim=-1, dtype=wide)
        squares = sizes.float().square()  # (batch, seq), `features` times the mean
    token = _squares.set(squares)
    try:
        yield
    finally:
        _squares.reset(token)


@contextmanager
def joined_weights(parts: Sequence[torch.Tensor | None]) -> Iterator[None]:
    """Use these weights, (tokens,) of each part of a batch, instead of those of the current one."""
    known = [each for each in parts if each is not None]
    token = _joined.set(torch.cat(known) if known else None)
    try:
        yield
    finally:
        _joined.reset(token)


def token_weights() -> torch.Tensor | None:
    """Return the weights of the current batch's real tokens, (tokens,); None outside of a layer.

    Their mean is 1 in each sample, so it does not matter how samples are batched.
    """
    squares, joined = _squares.get(), _joined.get()
    if joined is not None or squares is None:
        return joined
    mask = padding_mask()
    if mask is not None:
        squares = squares.masked_fill(~mask.to(squares.device), torch.nan)
    median = squares.nanmedian(-1, keepdim=True).values
    least = (median / _MOST).clamp(min=torch.finfo(torch.float32).tiny)
    weights = squares.clamp(min=least).reciprocal()
    weights = weights / weights.nanmean(-1, keepdim=True)
    return real_tokens(weights[..., None], "input").flatten()
