"""A progress bar with an estimate, on a terminal; lines now and then, where one is asked for."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from steelyard.pipelines.words import duration

__all__ = ["progress"]

_EVERY = 30.0  # seconds between two lines


@contextlib.contextmanager
def progress(
    label: str, total: int, show: bool | None = None, unit: str = "steps"
) -> Iterator[Callable[..., None]]:
    """Yield a function that advances the bar by one, or by as much as it is given.

    show: None shows it where standard error is a terminal; True writes lines elsewhere, as for the
          log of a batch job
    unit: steps | bytes
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show or total < 1:
        yield lambda amount=1: None
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
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    counts: list[Any] = [MofNCompleteColumn()]
    if unit == "bytes":
        counts = [DownloadColumn(), TransferSpeedColumn()]
    with Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        *counts,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount=1: bar.advance(task, amount)


class _Lines:
    """Says how far it is, at most every half minute."""

    def __init__(self, label: str, total: int) -> None:
        self.label = label
        self.total = total
        self.done = 0
        self.started = self.said = time.monotonic()

    def __call__(self, amount: int = 1) -> None:
        self.done += amount
        now = time.monotonic()
        if not self.done or now - self.said < _EVERY:
            return
        self.said = now
        left = (now - self.started) * (self.total / self.done - 1)
        print(
            f"{self.label}: {self.done / self.total:.0%}, about {duration(left)} left",
            file=sys.stderr,
            flush=True,
        )
