"""The dampening that held-out tokens choose, against regressions in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steelyard.kernels.dampening import STEPS, held_out_dampening

LEAST = 0.01


def tokens(seed: int, count: int, columns: int) -> torch.Tensor:
    """Return inputs that share a few directions, of columns with very different sizes."""
    make = torch.Generator().manual_seed(seed)
    mixing = torch.Generator().manual_seed(columns)
    directions = torch.randn(4, columns, generator=mixing)
    sizes = torch.randn(columns, generator=mixing).exp()
    common = torch.randn(count, 4, generator=make) @ directions
    return (common + torch.randn(count, columns, generator=make)).double() * sizes


def unexplained(fitted: torch.Tensor, judge: torch.Tensor, dampening: float) -> float:
    """Regress each column on those with smaller inputs, by ridge regression, one by one."""
    sizes = fitted.square().sum(0) + judge.square().sum(0)
    order = torch.argsort(sizes)
    x = fitted[:, order] / fitted.square().sum(0).mean().sqrt()
    held_out = judge[:, order] / judge.square().sum(0).mean().sqrt()
    left = 0.0
    for j in range(len(order)):
        seen = torch.cat([x[:, :j], dampening**0.5 * torch.eye(j).double()])
        wanted = torch.cat([x[:, j], torch.zeros(j).double()])
        factors = torch.linalg.lstsq(seen, wanted.unsqueeze(1)).solution.squeeze(1)
        left += float((held_out[:, j] - held_out[:, :j] @ factors).square().sum())
    return left


def hessian(x: torch.Tensor) -> torch.Tensor:
    return (x.t() @ x).float()


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16), st.integers(2, 24), st.integers(12, 200))
def test_no_other_step_leaves_less_in_held_out_tokens(seed: int, columns: int, count: int) -> None:
    even, odd = tokens(2 * seed, count, columns), tokens(2 * seed + 1, count, columns)
    found = held_out_dampening(hessian(even), hessian(odd), LEAST)
    left = {step: unexplained(even, odd, step * LEAST) for step in STEPS}
    chosen = min(STEPS, key=lambda step: abs(step * LEAST - found))
    assert found == pytest.approx(chosen * LEAST)
    assert left[chosen] <= min(left.values()) * (1 + 1e-3)


def test_few_tokens_need_more_than_many() -> None:
    few = [hessian(tokens(seed, 80, 64)) for seed in (0, 1)]
    many = [hessian(tokens(seed, 40_000, 64)) for seed in (0, 1)]
    assert held_out_dampening(*few, LEAST) > held_out_dampening(*many, LEAST)


def test_a_sample_of_columns_chooses_as_all_do(monkeypatch: pytest.MonkeyPatch) -> None:
    even, odd = (hessian(tokens(seed, 500, 300)) for seed in (0, 1))
    sampled = held_out_dampening(even, odd, LEAST)  # 258 of 300
    monkeypatch.setattr("steelyard.kernels.dampening._SAMPLE", 300)
    assert held_out_dampening(even, odd, LEAST) == sampled


@pytest.mark.parametrize("scale", [1e-12, 1e12])
def test_the_size_of_inputs_does_not_matter(scale: float) -> None:
    even, odd = (hessian(tokens(seed, 50, 32)) for seed in (0, 1))
    expected = held_out_dampening(even, odd, LEAST)
    assert held_out_dampening(even * scale, odd * scale, LEAST) == expected


@pytest.mark.parametrize("least", [0.0, LEAST])
def test_a_half_without_tokens_chooses_nothing(least: float) -> None:
    even = hessian(tokens(0, 50, 8))
    assert held_out_dampening(even, torch.zeros_like(even), least) == least
    assert held_out_dampening(torch.zeros_like(even), even, least) == least


def test_no_dampening_stays_none() -> None:
    even, odd = (hessian(tokens(seed, 50, 8)) for seed in (0, 1))
    assert held_out_dampening(even, odd, 0.0) == 0.0
