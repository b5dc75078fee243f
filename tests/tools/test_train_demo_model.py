"""Training of the demo model: what it sees, how fast it learns, and that it can be resumed."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch
import train_demo_model as script
from train_demo_model import LENGTH, batch_at, rate_at


def test_an_epoch_shows_every_window_once_and_the_next_one_orders_them_anew() -> None:
    tokens = torch.arange(10 * LENGTH + 7)
    steps = 4  # nine windows fit behind any shift, so four batches of two are whole
    epochs = [
        torch.cat([batch_at(epoch * steps + i, tokens, 2, seed=3) for i in range(steps)])
        for epoch in (0, 1)
    ]
    for windows in epochs:
        starts = windows[:, 0]
        torch.testing.assert_close(windows - starts[:, None], torch.arange(LENGTH + 1).repeat(8, 1))
        assert len(set((starts // LENGTH).tolist())) == len(starts)
        assert len(set((starts % LENGTH).tolist())) == 1
    assert not torch.equal(*epochs)


def test_rate_warms_up_and_ends_near_zero() -> None:
    rates = [rate_at(step, 2.0, warmup=10, steps=110) for step in range(110)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(1.0)
    assert 0 < rates[-1] < 0.001
    assert rates[10:] == sorted(rates[10:], reverse=True)


def run(work: Path, tokens: torch.Tensor, *, save_every: int, stop_at: int | None = None) -> dict:
    """Train a narrow model for six steps and return its weights; stop early if told so."""
    opt = argparse.Namespace(
        work=work, seed=1, steps=6, batch=1, rate=1e-3, warmup=2, save_every=save_every
    )
    model = script.new_model(vocab_size=256, layers=1, seed=1)
    if stop_at is not None:
        inner = model.forward
        calls = iter(range(stop_at))
        model.forward = lambda *args, **kwargs: (next(calls), inner(*args, **kwargs))[1]
    script.train(model, tokens, opt)
    return model.state_dict()


def test_a_run_that_was_cut_off_ends_where_an_unbroken_one_does(tmp_path: Path) -> None:
    tokens = torch.randint(256, (12 * LENGTH,), generator=torch.Generator().manual_seed(0))
    for name in ("whole", "cut"):
        (tmp_path / name).mkdir()
    whole = run(tmp_path / "whole", tokens, save_every=6)
    with pytest.raises(StopIteration):
        run(tmp_path / "cut", tokens, save_every=2, stop_at=5)
    resumed = run(tmp_path / "cut", tokens, save_every=2)
    assert torch.load(tmp_path / "cut" / "state.pt")["step"] == 6
    torch.testing.assert_close(resumed, whole, rtol=0, atol=0)


def test_state_of_other_settings_is_refused(tmp_path: Path) -> None:
    tokens = torch.zeros(12 * LENGTH, dtype=torch.long)
    run(tmp_path, tokens, save_every=6)
    with pytest.raises(SystemExit, match=r"state\.pt is of another run"):
        run(tmp_path, tokens[:-1], save_every=6)
