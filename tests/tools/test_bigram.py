"""The bigram model against probabilities that were worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from bigram import STRENGTHS, Bigram


def test_seen_pairs_lean_on_single_tokens_where_there_are_few() -> None:
    # After 0 came 1 twice and 2 once; tokens 0, 1, 2 occur 3, 2 and 1 times; 3 never does.
    bigram = Bigram(torch.tensor([0, 1, 0, 1, 0, 2]), vocab_size=4)
    by_hand = min(-math.log((2 + k * 3 / 10) / (3 + k)) for k in STRENGTHS)
    assert bigram.loss(torch.tensor([0]), torch.tensor([1])) == pytest.approx(by_hand)


def test_a_token_that_was_never_seen_still_has_a_probability() -> None:
    bigram = Bigram(torch.tensor([0, 1, 0, 1, 0, 2]), vocab_size=4)
    never = bigram.perplexity(torch.tensor([3]), torch.tensor([3]))
    assert never == pytest.approx(10.0)  # nothing was seen after 3, so (0 + 1) / (6 + 4) is left


def test_probabilities_of_one_strength_sum_to_one() -> None:
    bigram = Bigram(torch.randint(6, (500,), generator=torch.Generator().manual_seed(0)), 6)
    for k in STRENGTHS:
        table = (bigram.pairs + k * bigram.single) / (bigram.starts[:, None] + k)
        torch.testing.assert_close(table.sum(1), torch.ones(6, dtype=torch.float64))
