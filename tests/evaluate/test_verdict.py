"""The verdict: which word follows from which figures, and when there are too few tokens."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.errors import OptionError
from steelyard.evaluate import Evaluation, Limits, judge
from steelyard.evaluate.standard_error import RUN, mean_and_error, quantile_interval

GOOD = Evaluation(
    base="m",
    quantized="q",
    samples=8,
    tokens=10_000,
    base_perplexity=10.0,
    perplexity=10.05,
    kl_divergence=0.01,
    kl_p99=0.1,
    kl_max=1.0,
    top1_agreement=0.97,
    seconds=1.0,
    kl_error=0.001,
    loss_error=0.001,
    top1_error=0.002,
    kl_p99_low=0.09,
    kl_p99_high=0.12,
)


def test_good_figures_ship() -> None:
    found = judge(GOOD)
    assert (found.word, found.tokens_needed) == ("ship", None)
    assert len(found.reasons) == len(found.measures) == 4


@pytest.mark.parametrize(
    ("change", "word", "reason"),
    [
        ({"kl_divergence": 0.1}, "look", "KL divergence 0.1 (0.098 to 0.102): above 0.05"),
        ({"kl_divergence": 0.3}, "do not ship", "KL divergence 0.3 (0.298 to 0.302): above 0.2"),
        ({"perplexity": 14.2}, "do not ship", "perplexity change +42.0 %"),
        ({"perplexity": 10.6}, "look", "perplexity change +6.0 %"),
        ({"perplexity": math.inf}, "do not ship", "perplexity change unbounded"),
        ({"top1_agreement": 0.85}, "look", "same next token 85.0 % (84.6 % to 85.4 %): below 90.0"),
        ({"top1_agreement": 0.7}, "do not ship", "same next token 70.0 %"),
        ({"kl_p99": 5.0, "kl_p99_low": 4.0, "kl_p99_high": 9.0}, "do not ship", "99th percentile"),
    ],
)
def test_each_measure_can_decide(change: dict[str, float], word: str, reason: str) -> None:
    found = judge(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert found.word == word
    assert [reason in each for each in found.reasons] == [True]


def test_too_few_tokens_say_how_many_are_needed() -> None:
    unsure = dataclasses.replace(GOOD, kl_divergence=0.04, kl_error=0.02)
    found = judge(unsure)
    assert found.word == "look"
    # two standard errors are four times the distance to the limit, and shrink as a root
    assert found.tokens_needed == 16 * GOOD.tokens
    assert "10,000 tokens are too few to tell: evaluate at least 160,000" in found.reasons
    enough = dataclasses.replace(unsure, tokens=160_000, kl_error=0.02 / 4)
    assert judge(enough).word == "ship"


def test_unknown_errors_are_too_few_tokens() -> None:
    none = dict.fromkeys(("kl_error", "loss_error", "top1_error", "kl_p99_high"))
    found = judge(dataclasses.replace(GOOD, tokens=20, **none))  # type: ignore[arg-type]
    assert found.word == "look"
    assert found.tokens_needed is not None and found.tokens_needed >= 400


@settings(max_examples=200, deadline=None)
@given(st.floats(0, 1), st.floats(0, 0.3), st.floats(0.001, 0.5), st.floats(0, 0.5))
def test_a_larger_divergence_is_never_better(
    value: float, error: float, more: float, limit: float
) -> None:
    order = ("ship", "look", "do not ship")
    limits = Limits(kl=(limit, 2 * limit))
    words = [
        judge(dataclasses.replace(GOOD, kl_divergence=kl, kl_error=error), limits).word
        for kl in (value, value + more)
    ]
    assert order.index(words[0]) <= order.index(words[1])


def test_limits_are_read_from_text() -> None:
    found = Limits.parse(["kl=0.01:0.02", "top1=0.95"])
    assert found.kl == (0.01, 0.02) and found.top1 == (0.95, 0.9)
    assert found.p99 == Limits().p99
    assert judge(GOOD, Limits.parse(["kl=0.005:0.006"])).word == "do not ship"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("kl", "write kl=SHIP"),
        ("kll=1", "did you mean 'kl'"),
        ("kl=x", "write kl=SHIP"),
        ("kl=0.2:0.1", "must be above the limit to ship"),
        ("top1=0.8:0.9", "must be below the limit to ship"),
        ("kl=nan", "the limit to stop"),
    ],
)
def test_wrong_limits_are_refused(text: str, message: str) -> None:
    with pytest.raises(OptionError, match=message):
        Limits.parse([text])


# -- standard errors ----------------------------------------------------------------------------


def test_standard_error_of_independent_runs_is_numpys() -> None:
    values = np.random.default_rng(0).exponential(size=(40, RUN))
    mean, error = mean_and_error([torch.from_numpy(values.reshape(-1)[: 10 * RUN * 4])])
    assert mean == pytest.approx(values.mean())
    assert error == pytest.approx(values.mean(1).std(ddof=1) / math.sqrt(40))


def test_tokens_that_repeat_count_once() -> None:
    runs = torch.randn(50, 1, generator=torch.Generator().manual_seed(0))
    _, error = mean_and_error([runs.expand(-1, RUN).reshape(-1)])
    assert error == pytest.approx(float(runs.std()) / math.sqrt(50), rel=1e-5)
    assert mean_and_error([torch.ones(3)]) == (1.0, math.inf)


def test_interval_of_a_quantile_holds_the_true_one() -> None:
    generator = np.random.default_rng(1)
    true, held = -math.log(0.01), 0
    for _ in range(300):
        values = torch.from_numpy(np.sort(generator.exponential(size=2000)))
        low, high = quantile_interval(values, 0.99)
        held += low <= true <= high
    assert held >= 0.93 * 300
    assert quantile_interval(values[:300], 0.99)[1] == math.inf
