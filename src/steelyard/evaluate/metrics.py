"""The mathematics: two distributions over the next token, compared in double precision.

Differences between a model and its 8-bit copy are as small as the rounding of fp32 makes the sums
of a large vocabulary, so nothing is left to fp32.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

__all__ = ["Scores", "Summary", "score", "summarize"]


@dataclass(frozen=True)
class Scores:
    """What is known of each token; all are (tokens), fp64, but `agrees`, which is bool.

    base_loss, loss: negative log-probability of the token that follows
    divergence:      KL(base || quantized)
    agrees:          whether both find the same token most likely
    """

    base_loss: torch.Tensor
    loss: torch.Tensor
    divergence: torch.Tensor
    agrees: torch.Tensor


@dataclass(frozen=True)
class Summary:
    """Means over all tokens, under the names that `Evaluation` has for them."""

    tokens: int
    base_perplexity: float
    perplexity: float
    kl_divergence: float
    kl_p99: float
    kl_max: float
    top1_agreement: float


@torch.no_grad()
def score(base: torch.Tensor, quantized: torch.Tensor, targets: torch.Tensor) -> Scores:
    """Compare two models' logits.

    base, quantized: (tokens, vocabulary)
    targets:         (tokens) int64, the token that follows each

    KL(p || q) = sum over the vocabulary of p (log p - log q), never below 0 but for rounding.
    """
    log_p = base.double().log_softmax(-1)
    log_q = quantized.double().log_softmax(-1)
    chosen = targets.unsqueeze(-1)  # (tokens, 1)
    base_loss, loss = (-log.gather(-1, chosen).squeeze(-1) for log in (log_p, log_q))
    difference = log_q.sub_(log_p).neg_()  # in place: memory is what this waits for
    divergence = torch.linalg.vecdot(log_p.exp_(), difference).clamp_min(0)
    return Scores(base_loss, loss, divergence, base.argmax(-1) == quantized.argmax(-1))


def summarize(scores: list[Scores]) -> Summary:
    """Return means, and of the divergence the smallest value that 99 of 100 tokens keep to."""
    divergence = torch.cat([s.divergence for s in scores]).sort().values
    count = len(divergence)
    return Summary(
        count,
        _perplexity(torch.cat([s.base_loss for s in scores])),
        _perplexity(torch.cat([s.loss for s in scores])),
        float(divergence.mean()),
        float(divergence[math.ceil(0.99 * count) - 1]),
        float(divergence[-1]),
        float(torch.cat([s.agrees for s in scores]).double().mean()),
    )


def _perplexity(losses: torch.Tensor) -> float:
    return float(losses.mean().exp())  # infinity where that is too large
