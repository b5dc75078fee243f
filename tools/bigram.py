"""A bigram model of tokens: the baseline that the demo model must beat by far.

It counts how often each token follows each other one in the training text, smoothed with the
frequency of single tokens:

    p(b | a) = (count(a, b) + k * p(b)) / (count(a) + k)        p(b) = (count(b) + 1) / (n + vocab)

`k`, the only parameter, is fitted to the evaluated tokens, which favours this model.
"""

from __future__ import annotations

import math

import torch

STRENGTHS = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 5000.0)


class Bigram:
    """Counts of `tokens`, a 1-D tensor of ids below `vocab_size`."""

    def __init__(self, tokens: torch.Tensor, vocab_size: int) -> None:
        pairs = tokens[:-1] * vocab_size + tokens[1:]
        counts = torch.bincount(pairs, minlength=vocab_size**2)
        self.pairs = counts.reshape(vocab_size, vocab_size).double()
        self.starts = self.pairs.sum(1)
        single = torch.bincount(tokens, minlength=vocab_size).double()
        self.single = (single + 1) / (single.sum() + vocab_size)

    def loss(self, before: torch.Tensor, after: torch.Tensor) -> float:
        """Return the mean of -log p(after | before), with the best `k` for these tokens."""
        pairs, starts, single = self.pairs[before, after], self.starts[before], self.single[after]
        return min(-float(((pairs + k * single) / (starts + k)).log().mean()) for k in STRENGTHS)

    def perplexity(self, before: torch.Tensor, after: torch.Tensor) -> float:
        return math.exp(self.loss(before, after))
