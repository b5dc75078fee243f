"""Ctrl-C: wherever it comes, it ends the command with one line and 130."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import Command

from steelyard.cli.interrupts import interruptible


@pytest.fixture(autouse=True)
def default_handler() -> Iterator[None]:
    """Have Python's handler: a shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Interrupts:
    """Is interrupted while it is finalized, where Python drops what is raised."""

    def __del__(self) -> None:
        os.kill(os.getpid(), signal.SIGINT)


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: found.append(what.exc_type))
    return found


def wait(seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def test_interrupt_dropped_by_a_finalizer_arrives(dropped: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        Interrupts()
        wait()
    assert dropped == [KeyboardInterrupt]


def test_interrupt_dropped_while_the_main_thread_waits_arrives(dropped: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        Interrupts()
        threading.Event().wait(10)
    assert dropped == [KeyboardInterrupt]


def test_cleaning_up_is_not_interrupted() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
        finally:
            wait(0.7)
            try:
                raise ValueError
            except ValueError:
                wait(0.5)
            steps.append("cleaned up")
    assert steps == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_ends_the_cleaning_up() -> None:
    steps = []
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
            steps.append("cleaned up")
    assert steps == []


def test_nothing_comes_after_the_end(dropped: list[Any]) -> None:
    with interruptible():
        Interrupts()
    wait(0.5)
    assert dropped == [KeyboardInterrupt]


def test_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_command_says_that_it_was_interrupted(
    steelyard: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.pipelines import compare

    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait()

    monkeypatch.setattr(compare, "_energy", interrupted)
    answer = steelyard("compare", model)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == "error: interrupted\n"
