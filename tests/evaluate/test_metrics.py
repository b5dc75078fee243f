"""The comparison of distributions against NumPy in float64, and against what must be true."""

from __future__ import annotations

import math

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch.testing import assert_close

from steelyard.evaluate.metrics import Scores, score, summarize

Array = NDArray[np.float64]
SEEDS = st.integers(0, 2**32 - 1)


def log_probabilities(logits: Array) -> Array:
    shifted = logits - logits.max(-1, keepdims=True)
    result: Array = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return result


def make(
    seed: int, tokens: int, vocabulary: int, spread: float, noise: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    base = torch.randn(tokens, vocabulary, generator=generator) * spread
    other = base + torch.randn(tokens, vocabulary, generator=generator) * noise
    return base, other, torch.randint(vocabulary, (tokens,), generator=generator)


@settings(deadline=None, max_examples=60)
@given(
    SEEDS,
    st.integers(1, 40),
    st.integers(2, 300),
    st.floats(0.01, 100),
    st.sampled_from([0.0, 1e-6, 1e-3, 0.1, 1.0, 30.0]),
)
def test_score_equals_numpy(
    seed: int, tokens: int, vocabulary: int, spread: float, noise: float
) -> None:
    base, other, targets = make(seed, tokens, vocabulary, spread, noise)
    found = score(base, other, targets)
    p, q = (log_probabilities(t.double().numpy()) for t in (base, other))
    rows = np.arange(tokens)
    divergence = np.maximum((np.exp(p) * (p - q)).sum(-1), 0)
    assert_close(found.base_loss, torch.from_numpy(-p[rows, targets]), rtol=1e-12, atol=1e-13)
    assert_close(found.loss, torch.from_numpy(-q[rows, targets]), rtol=1e-12, atol=1e-13)
    assert_close(found.divergence, torch.from_numpy(divergence), rtol=1e-9, atol=1e-13)
    agrees = base.numpy().argmax(-1) == other.numpy().argmax(-1)
    assert_close(found.agrees, torch.from_numpy(agrees))


@settings(deadline=None, max_examples=30)
@given(SEEDS, st.floats(0.01, 1000))
def test_a_model_does_not_differ_from_itself(seed: int, spread: float) -> None:
    base, _, targets = make(seed, 8, 50, spread, 0)
    kept = base.clone()
    found = score(base, base, targets)
    assert_close(found.divergence, torch.zeros(8, dtype=torch.float64), rtol=0, atol=0)
    assert_close(base, kept, rtol=0, atol=0)
    assert found.agrees.all()


def test_a_shift_of_all_logits_is_no_difference() -> None:
    base, _, targets = make(0, 8, 50, 3, 0)
    found = score(base.double(), base.double() + 1000, targets)
    assert_close(found.divergence, torch.zeros(8, dtype=torch.float64), rtol=0, atol=1e-10)


def test_known_distributions() -> None:
    base = torch.tensor([[0.5, 0.5], [0.9, 0.1]]).double().log()
    other = torch.tensor([[0.25, 0.75], [0.1, 0.9]]).double().log()
    found = score(base, other, torch.tensor([0, 1]))
    expected = [0.5 * math.log(2) + 0.5 * math.log(2 / 3), 0.8 * math.log(9)]
    assert_close(found.divergence, torch.tensor(expected, dtype=torch.float64))
    summary = summarize([found])
    assert_close(summary.base_perplexity, math.sqrt(1 / (0.5 * 0.1)))
    assert_close(summary.perplexity, math.sqrt(1 / (0.25 * 0.9)))


def test_summary_is_over_tokens_whatever_the_parts() -> None:
    base, other, targets = make(1, 250, 20, 2, 1)
    whole = score(base, other, targets)
    parts = [score(base[i : i + 7], other[i : i + 7], targets[i : i + 7]) for i in range(0, 250, 7)]
    found, expected = summarize(parts), summarize([whole])
    assert (found.tokens, found.top1_agreement) == (250, expected.top1_agreement)
    assert_close(found.kl_divergence, expected.kl_divergence)
    assert_close(found.kl_max, float(whole.divergence.max()))
    # 248 of 250 are 99.2 of 100; 247 would be 98.8
    assert_close(found.kl_p99, float(np.sort(whole.divergence.numpy())[247]))


def test_perplexity_too_large_for_a_number() -> None:
    loss = torch.tensor([1e4], dtype=torch.float64)
    none = torch.zeros(1, dtype=torch.float64)
    assert summarize([Scores(none, loss, none, none.bool())]).perplexity == math.inf
