"""Statistics of an expert with few tokens, completed by those of its layer.

S is the sum of w^2 x x^T over the N tokens that the router sent to an expert, with the weight w of
the expert's output for each: the layer adds w (W - Q) x to its output, so that is what an error of
the weight W costs. S / N estimates a matrix of n x n entries, poorly where N is not well above n.
Before any token is seen, the best guess is the mean over all experts of the layer, M. Taken as
worth n tokens, as many as the matrix has columns, it gives

    (S + n M) / (N + n),        M = sum of all S / sum of all N

the posterior mean under the conjugate prior of a covariance. An expert with N >> n keeps its own
statistics, one with no token has those of the layer. GPTQ and importance do not change if H is
multiplied by a number, so S + n M is all that is needed.

For the inputs of gate and up, M is a matrix over the channels of the hidden state, the same for all
experts. The inputs of down are each expert's own channels: channel 5 of one expert and channel 5 of
another have nothing in common. What is left of M if channels are exchangeable is its mean diagonal:

    M = c I,                    c = sum of all tr S / (n * sum of all N)
"""

from __future__ import annotations

import torch

__all__ = ["isotropic", "prior_factor", "prior_tokens"]


def prior_tokens(columns: int) -> int:
    """Return how many tokens the statistics of the layer are worth to an expert: n."""
    return columns


def prior_factor(columns: int, tokens: int) -> float:
    """Return what the sum of all S is multiplied by to give n M.

    tokens: of all experts together
    """
    return prior_tokens(columns) / tokens


def isotropic(diagonal: torch.Tensor) -> torch.Tensor:
    """Return a diagonal whose entries are all the mean of the given one."""
    return torch.full_like(diagonal, float(diagonal.double().mean()))
