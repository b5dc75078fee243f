"""Weights of tokens: one over the mean square of the hidden state, against NumPy."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.observers.hessians import Hessians
from steelyard.observers.padding import without_padding
from steelyard.observers.token_weights import hidden_state, token_weights

sizes = st.floats(1e-3, 1e3)


@st.composite
def batches(draw: st.DrawFn) -> tuple[torch.Tensor, torch.Tensor]:
    """A hidden state, (batch, seq, features), and a mask with at least one token a sample."""
    samples, length = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    size = torch.tensor(draw(st.lists(sizes, min_size=samples * length, max_size=samples * length)))
    hidden = torch.randn(samples, length, 5, generator=generator) * size.reshape(samples, length, 1)
    mask = torch.rand(samples, length, generator=generator) < 0.7
    mask[:, draw(st.integers(0, length - 1))] = True
    return hidden, mask


def by_hand(hidden: torch.Tensor, mask: torch.Tensor) -> np.ndarray:
    found = []
    for sample, real in zip(hidden.double().numpy(), mask.numpy(), strict=True):
        squares = np.square(sample[real]).mean(-1)
        lower_median = np.sort(squares)[(len(squares) - 1) // 2]
        inverse = 1 / np.maximum(squares, lower_median / 4)
        found.append(inverse / inverse.mean())
    return np.concatenate(found)


@given(batches())
def test_against_numpy(batch: tuple[torch.Tensor, torch.Tensor]) -> None:
    hidden, mask = batch
    with hidden_state(hidden), without_padding(mask):
        found = token_weights()
    assert found is not None
    assert_close(found.double(), torch.from_numpy(by_hand(hidden, mask)), rtol=1e-5, atol=0)


@given(batches())
def test_the_same_whatever_the_batch_size_and_the_unit(
    batch: tuple[torch.Tensor, torch.Tensor],
) -> None:
    hidden, mask = batch
    with hidden_state(hidden), without_padding(mask):
        together = token_weights()
    alone = []
    for sample, real in zip(hidden, mask, strict=True):
        with hidden_state(4 * sample[None]), without_padding(real[None]):
            alone.append(token_weights())
    assert together is not None
    assert torch.equal(together, torch.cat(alone))  # type: ignore[arg-type]


def test_a_huge_token_counts_little_and_a_tiny_one_four_times() -> None:
    hidden = torch.ones(1, 8, 3)
    hidden[0, 0], hidden[0, 5] = 1e3, 1e-9
    with hidden_state(hidden):
        found = token_weights()
    assert found is not None
    assert_close(found[0] / found[1], torch.tensor(1e-6))
    assert_close(found[5] / found[1], torch.tensor(4.0))


def test_none_outside_of_a_layer() -> None:
    assert token_weights() is None
    with hidden_state(torch.ones(4, 3)):  # tokens of all samples in one row
        assert token_weights() is None


def test_hessians_and_drift_are_sums_of_weighed_tokens() -> None:
    generator = torch.Generator().manual_seed(0)
    linear = torch.nn.Linear(6, 4, bias=False)
    hessians = Hessians({"l": linear})
    terms = []
    for batch in range(4):
        x, original = torch.randn(2, 2, 7, 6, generator=generator)
        roots = torch.rand(14, generator=generator)
        hessians.see(["l"], x, weights=roots, original=original, batch=batch)
        terms.append((x.reshape(14, 6).double(), original.reshape(14, 6).double(), roots.double()))
    hessians.flush()
    found = hessians.halves("l")
    assert found is not None
    for half in (0, 1):
        some = terms[half::2]
        moment = sum(x.t() @ (w.square()[:, None] * x) for x, _, w in some)
        drift = sum((o - x).t() @ (w.square()[:, None] * x) for x, o, w in some)
        assert_close(found[0][half].double(), moment, rtol=1e-5, atol=1e-5)
        assert_close(found[1][half].double(), drift, rtol=1e-5, atol=1e-5)
