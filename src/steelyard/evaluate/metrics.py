"""Compares two distributions over the next token, in fp64.

The difference between a model and its 8-bit copy can be as small as fp32's rounding error in sums
over a large vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import torch

from steelyard.evaluate.standard_error import mean_and_error, quantile_interval

__all__ = ["Metrics", "Scores", "score", "summarize"]


@dataclass(frozen=True)
class Scores:
    """Metrics per token, (tokens) each: fp64, and bool for `agrees`.

    base_loss, loss: negative log-likelihood of the next token
    divergence:      KL(base || quantized)
    agrees:          whether both models predict the same token
    base_top, top:   the tokens that they predict, int64
    """

    base_loss: torch.Tensor
    loss: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor
    base_top: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    top: torch.Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))

    @classmethod
    def joined(cls, parts: Sequence[Scores]) -> Scores:
        """Return the scores of consecutive tokens as one."""
        each = [[getattr(part, f.name) for part in parts] for f in fields(cls)]
        return cls(*map(torch.cat, each))

    def ordered(self, order: torch.Tensor) -> Scores:
        """Return the scores of the tokens in another order."""
        return Scores(*(getattr(self, f.name)[order.to(self.loss.device)] for f in fields(self)))


@dataclass(frozen=True)
class Metrics:
    """Means over all tokens; see `Evaluation` for the fields."""

    tokens: int
    base_perplexity: float
    perplexity: float
    kl_divergence: float
    kl_p99: float
    kl_max: float
    top1_agreement: float
    kl_error: float | None
    loss_error: float | None
    top1_error: float | None
    kl_p99_low: float | None
    kl_p99_high: float | None


@torch.no_grad()
def score(base: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Compare two models' logits.

    base, quantized: (tokens, vocabulary)
    targets:         (tokens) int64, the next tokens

    KL(p || q) = sum over the vocabulary of p (log p - log q), clamped at 0 against rounding.
    """
    log_p = base.double().log_softmax(-1)
    log_q = quantized.double().log_softmax(-1)
    chosen = targets.unsqueeze(-1)  # (tokens, 1)
    base_loss, loss = (-log.gather(-1, chosen).squeeze(-1) for log in (log_p, log_q))
    difference = log_q.sub_(log_p).neg_()  # in place: this is bound by memory bandwidth
    divergence = torch.linalg.vecdot(log_p.exp_(), difference).clamp_min(0)
    base_top, top = base.argmax(-1), quantized.argmax(-1)
    return Scores(base_loss, loss, divergence, base_top == top, base_top, top)


def summarize(scores: list[Scores]) -> Metrics:
    """Return means over tokens with standard errors, and the tail of the divergence.

    scores: one for each run of consecutive tokens
    """
    divergence = torch.cat([s.divergence for s in scores]).sort().values
    count = len(divergence)
    return Metrics(
        count,
        _perplexity(torch.cat([s.base_loss for s in scores])),
        _perplexity(torch.cat([s.loss for s in scores])),
        float(divergence.mean()),
        float(divergence[math.ceil(0.99 * count) - 1]),
        float(divergence[-1]),
        float(torch.cat([s.agrees for s in scores]).double().mean()),
        _known(mean_and_error([s.divergence for s in scores])[1]),
        _known(mean_and_error([s.loss - s.base_loss for s in scores])[1]),
        _known(mean_and_error([s.agrees for s in scores])[1]),
        *map(_known, quantile_interval(divergence, 0.99)),
    )


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _perplexity(losses: torch.Tensor) -> float:
    return float(losses.mean().exp())  # may overflow to infinity
