"""Progress where there is no terminal: lines with an estimate, now and then, if asked for."""

from __future__ import annotations

import pytest

from steelyard.engine import progress as module
from steelyard.engine.progress import progress


def test_lines_with_an_estimate(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("calibrating", 40, show=True) as advance:
        for _ in range(40):
            now[0] += 10.0
            advance()
    said = capsys.readouterr().err.splitlines()
    assert said[0] == "calibrating: 8%, about 6 min left"
    assert len(said) == 13  # of 400 seconds, every 30


def test_no_time_is_left_at_the_end(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    with progress("calibrating", 1000, show=True) as advance:
        now[0] += 1000.0
        advance(999)
        now[0] += 1000.0
        advance(1, "the last layer")
    said = capsys.readouterr().err.splitlines()
    assert said == ["calibrating: 99%, about 1 s left", "calibrating: 100% (the last layer)"]


def test_silence_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    with progress("calibrating", 3) as advance:
        advance(3)
    assert capsys.readouterr().err == ""
