"""The weight to round to where inputs have drifted: against the error of every token, in fp64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from steelyard.kernels.drift import InputDrift

OUT, IN = 3, 6
Half = tuple[torch.Tensor, torch.Tensor]  # inputs, drifted inputs


def tokens(seed: int, count: int, drift: float) -> Half:
    """Inputs that drift in one way for all tokens, and by chance on top."""
    generator = torch.Generator().manual_seed(seed)
    ways = torch.Generator().manual_seed(7)
    x = torch.randn(count, IN, generator=generator, dtype=torch.float64)
    way = torch.randn(IN, IN, generator=ways, dtype=torch.float64) * 0.3
    noise = torch.randn(count, IN, generator=generator, dtype=torch.float64) * 0.2
    return x, x + drift * (x @ way + noise)


def weight_of(seed: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(OUT, IN, generator=generator, dtype=torch.float64)


def shifted(
    weight: torch.Tensor,
    halves: list[Half],
    dampening: float = 0.0,
    rows: int = 0,
    multiplied: bool = False,
):
    """Call it with statistics of the tokens."""
    hessians = [(drifted.t() @ drifted).float() for _, drifted in halves]
    drifts = [((x - drifted).t() @ drifted).float() for x, drifted in halves]
    count = sum(len(x) for x, _ in halves)
    if multiplied:  # another weight comes first
        both = torch.cat([weight.flip(0), weight]).float()
        drifts = [both @ drift for drift in drifts]
    drift = InputDrift((*hessians,), (*drifts,), count, dampening, rows, multiplied)
    return drift.shifted(weight.float(), len(weight) if multiplied else 0)


def error(weight: torch.Tensor, stored: torch.Tensor, half: Half) -> float:
    x, drifted = half
    return float((x @ weight.t() - drifted @ stored.t()).square().sum())


def fit(weight: torch.Tensor, half: Half, size: float) -> torch.Tensor:
    """The best weight for a half, by least squares over its tokens, and IN that have not drifted.

    size: the mean square of inputs
    """
    x, drifted = half
    more = torch.eye(IN, dtype=torch.float64) * (IN * size) ** 0.5
    inputs = torch.cat([drifted, more])
    outputs = torch.cat([x, more]) @ weight.t()
    return torch.linalg.lstsq(inputs, outputs).solution.t()


def size_of(halves: list[Half]) -> float:
    return float(torch.cat([drifted for _, drifted in halves]).square().mean())


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.integers(IN + 2, 60),
    drift=st.floats(0.01, 2.0),
)
def test_factor_is_the_best_for_tokens_of_the_other_half(
    seed: int, count: int, drift: float
) -> None:
    weight = weight_of()
    halves = [tokens(2 * seed + k, count, drift) for k in (0, 1)]
    _, factor = shifted(weight, halves)
    shifts = [fit(weight, half, size_of(halves)) - weight for half in halves]
    errors = {
        a / 200: sum(
            error(weight, weight + a / 200 * shift, other)
            for shift, other in zip(shifts, reversed(halves), strict=True)
        )
        for a in range(201)
    }
    assert factor == pytest.approx(min(errors, key=errors.__getitem__), abs=0.006)


@pytest.mark.parametrize("rows", [OUT, IN])  # the weight alone, or others that share its input
@pytest.mark.parametrize("multiplied", [False, True])
def test_with_many_tokens_the_weight_is_the_least_squares_fit(rows: int, multiplied: bool) -> None:
    weight = weight_of()
    halves = [tokens(k, 4000, 0.5) for k in (0, 1)]
    found, factor = shifted(weight, halves, rows=rows, multiplied=multiplied)
    both = tuple(torch.cat([one, other]) for one, other in zip(*halves, strict=True))
    assert factor > 0.98
    best = fit(weight, (both[0], both[1]), size_of(halves))
    assert_close(found.double(), weight + factor * (best - weight), rtol=1e-3, atol=1e-4)


def test_without_drift_the_weight_is_its_own() -> None:
    weight = weight_of()
    found, factor = shifted(weight, [tokens(k, 30, 0.0) for k in (0, 1)])
    assert factor == 0.0
    assert torch.equal(found, weight.float())


def test_a_half_without_tokens_confirms_nothing() -> None:
    weight = weight_of()
    half, empty = tokens(0, 30, 0.5), tokens(1, 0, 0.5)
    found, factor = shifted(weight, [half, empty], dampening=0.01)
    assert factor == 0.0
    assert torch.equal(found, weight.float())


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_size_of_inputs_does_not_matter(scale: float) -> None:
    weight = weight_of()
    halves = [tokens(k, 40, 0.5) for k in (0, 1)]
    scaled = [(scale * x, scale * y) for x, y in halves]
    found, factor = shifted(weight, scaled, dampening=0.01)
    expected, same = shifted(weight, halves, dampening=0.01)
    assert factor == pytest.approx(same, rel=1e-3)
    assert_close(found, expected, rtol=1e-3, atol=1e-4)
