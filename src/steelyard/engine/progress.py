"""A progress bar with the time left on a terminal; elsewhere, on request, a line now and then."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from steelyard.words import duration

__all__ = ["progress", "say"]

_EVERY = 30.0  # seconds between two lines


def say(text: str, show: bool | None = None) -> None:
    """Print a line where `progress` would be shown."""
    if sys.stderr.isatty() if show is None else show:
        print(text, file=sys.stderr, flush=True)


@contextlib.contextmanager
def progress(
    label: str, total: float, show: bool | None = None, unit: str = "steps"
) -> Iterator[Callable[..., None]]:
    """Yield `advance(amount=1, where="")`; `where` names the current step after the label.

    show: None shows the bar if standard error is a terminal; True also writes lines elsewhere, for
          the log of a batch job
    unit: steps | bytes | work (a percentage, with the time left at the average rate of the whole
          run: for steps of known but unequal cost)
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show or total < 1:
        yield lambda amount=1, where="": None
        return
    if not sys.stderr.isatty():
        yield _Lines(label, total)
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        Task,
        TaskProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )
    from rich.text import Text

    counts: list[Any] = [MofNCompleteColumn()]
    if unit == "bytes":
        counts = [DownloadColumn(), TransferSpeedColumn()]
    elif unit == "work":
        counts = [TaskProgressColumn()]

    class Left(TextColumn):
        def render(self, task: Task) -> Text:
            known = task.elapsed and 0 < task.completed < (task.total or 0)
            left = _left(task.elapsed or 0, task.completed, task.total or 0) if known else None
            return Text("" if left is None else f"about {duration(left)} left")

    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeElapsedColumn(),
        Left("") if unit == "work" else TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    ) as bar:
        task = bar.add_task(label, total=total)

        def advance(amount: float = 1, where: str = "") -> None:
            bar.update(task, advance=amount, description=f"{label}: {where}" if where else label)

        yield advance


def _left(elapsed: float, done: float, total: float) -> float:
    """Return the seconds left at the average rate so far."""
    return elapsed * (total / done - 1)


class _Lines:
    """Prints the progress, at most every half minute."""

    def __init__(self, label: str, total: float) -> None:
        self.label = label
        self.total = total
        self.done = 0.0
        self.started = self.said = time.monotonic()

    def __call__(self, amount: float = 1, where: str = "") -> None:
        self.done += amount
        now = time.monotonic()
        if not self.done or now - self.said < _EVERY:
            return
        self.said = now
        text = f"{self.label}: 100%"
        if self.done < self.total:  # 99.6% would round to 100%
            left = duration(_left(now - self.started, self.done, self.total))
            text = f"{self.label}: {min(self.done / self.total, 0.99):.0%}, about {left} left"
        print(f"{text} ({where})" if where else text, file=sys.stderr, flush=True)
