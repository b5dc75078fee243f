"""Held-out samples decide whether a change is kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from steelyard.algorithms.guard import is_gain, paired_gain

LOSSES = st.floats(0, 100, width=32)


@given(st.lists(st.tuples(LOSSES, LOSSES), min_size=2, max_size=20))
def test_gain_is_that_of_paired_samples(pairs: list[tuple[float, float]]) -> None:
    start, after = (list(each) for each in zip(*pairs, strict=True))
    won = np.array(start) - np.array(after)
    mean, error = paired_gain(start, after)
    np.testing.assert_allclose(mean, won.mean(), rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(error, won.std(ddof=1) / np.sqrt(len(won)), rtol=1e-6, atol=1e-7)


def test_only_more_than_noise_is_a_gain() -> None:
    assert is_gain([3.0, 5.0, 4.0], [2.9, 4.8, 3.9])
    assert not is_gain([3.0, 5.0, 4.0], [2.0, 5.5, 4.2])  # better on average, by one sample
    assert not is_gain([3.0, 5.0], [3.0, 5.0])
    assert is_gain([3.0], [2.9]) and not is_gain([3.0], [3.1])
