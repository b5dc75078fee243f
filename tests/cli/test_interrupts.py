"""Ctrl-C: wherever it comes, it ends the command with one line and 130."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

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

    dropped: ClassVar[list[BaseException]] = []

    def __del__(self) -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
        except KeyboardInterrupt as error:
            self.dropped.append(error)
            raise


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Return what is reported of exceptions that Python drops."""
    found: list[Any] = []
    monkeypatch.setattr(Interrupts, "dropped", [])
    monkeypatch.setattr(sys, "unraisablehook", lambda what: found.append(what.exc_type))
    return found


def wait(seconds: float = 10.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)


def test_interrupt_dropped_by_a_finalizer_arrives(reported: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        Interrupts()
        wait()
    assert len(Interrupts.dropped) == 1
    assert reported == []


def test_interrupt_dropped_while_the_main_thread_waits_arrives(reported: list[Any]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        Interrupts()
        threading.Event().wait(10)
    assert len(Interrupts.dropped) == 1
    assert reported == []


def test_interrupt_dropped_by_a_weak_reference_arrives(reported: list[Any]) -> None:
    """As by those that `WeakSet` keeps, which torch has."""

    def called(_: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait()

    with pytest.raises(KeyboardInterrupt), interruptible():
        kept = {1}
        reference = weakref.ref(kept, called)
        del kept
        assert reference() is None
        wait()
    assert reported == []


def test_other_dropped_exceptions_are_reported(reported: list[Any]) -> None:
    def called(_: object) -> None:
        raise ValueError

    with interruptible():
        kept = {1}
        reference = weakref.ref(kept, called)
        del kept
        assert reference() is None
    assert reported == [ValueError]


def interrupted(clean_up: Callable[[], None]) -> None:
    with pytest.raises(KeyboardInterrupt), interruptible():
        try:
            os.kill(os.getpid(), signal.SIGINT)
            wait()
        finally:
            clean_up()


def test_cleaning_up_is_not_interrupted() -> None:
    steps = []

    def clean_up() -> None:
        wait(0.7)
        try:
            raise ValueError
        except ValueError:
            wait(0.5)
        steps.append("cleaned up")

    interrupted(clean_up)
    assert steps == ["cleaned up"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_second_interrupt_ends_the_cleaning_up() -> None:
    steps = []

    def clean_up() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait()
        steps.append("cleaned up")

    interrupted(clean_up)
    assert steps == []


def test_nothing_comes_after_the_end(reported: list[Any]) -> None:
    with interruptible():
        Interrupts()
    wait(0.5)
    assert len(Interrupts.dropped) == 1
    assert reported == []


def test_ignored_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with interruptible():
        os.kill(os.getpid(), signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_a_command_says_that_it_was_interrupted(
    steelyard: Command, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.engine import weight_comparison as compare

    def interrupted(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        wait()

    monkeypatch.setattr(compare, "_energy", interrupted)
    answer = steelyard("compare", model)
    assert (answer.code, answer.out) == (130, "")
    assert answer.err == "error: interrupted\n"


EARLY = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == IMPORTED:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Interrupts())
from steelyard.cli import main
sys.argv[1:] = ["ls"]
main()
"""


@pytest.mark.parametrize("imported", ["steelyard.cli.app", "typer", "steelyard.cli.quantize"])
def test_interrupt_while_the_commands_are_imported(imported: str) -> None:
    code = EARLY.replace("IMPORTED", repr(imported))
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")
