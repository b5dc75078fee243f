"""Shrinks the statistics of an expert with few tokens toward those of its layer.

S is the sum of w^2 x x^T over the N tokens routed to an expert, with the router weight w of each:
an error of the weight W adds w (W - Q) x to the layer's output. S / N estimates a matrix of n x n
entries, poorly where N is not well above n. Without tokens, the best estimate is the mean over all
experts of the layer, M. Weighted as n tokens, as many as the matrix has columns, it gives

    (S + n M) / (N + n),        M = sum of all S / sum of all N

the posterior mean under the conjugate prior of a covariance. An expert with N >> n keeps its own
statistics, one without tokens gets those of the layer. GPTQ and importance do not change if H is
multiplied by a constant, so S + n M is enough.

For the inputs of gate and up, M is a matrix over the channels of the hidden state, the same for all
experts. The inputs of down are each expert's own channels: channel 5 of one expert and channel 5 of
another have nothing in common. For exchangeable channels, M reduces to its mean diagonal:

    M = c I,                    c = sum of all tr S / (n * sum of all N)
"""

from __future__ import annotations

import torch

__all__ = ["isotropic", "prior_factor", "prior_tokens"]


def prior_tokens(columns: int) -> int:
    """Return n, the weight of the layer's statistics in tokens."""
    return columns


def prior_factor(columns: int, tokens: int) -> float:
    """Return the factor that turns the sum of all S into n M.

    tokens: of all experts together
    """
    return prior_tokens(columns) / tokens


def isotropic(diagonal: torch.Tensor) -> torch.Tensor:
    """Return a diagonal whose entries are all the mean of the given one."""
    return torch.full_like(diagonal, float(diagonal.double().mean()))
