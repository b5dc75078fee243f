"""A progress bar with an estimate, on a terminal; silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["progress"]


@contextlib.contextmanager
def progress(
    label: str, total: int, show: bool | None = None, unit: str = "steps"
) -> Iterator[Callable[..., None]]:
    """Yield a function that advances the bar by one, or by as much as it is given.

    show: None shows it where standard error is a terminal
    unit: steps | bytes
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show or total < 1:
        yield lambda amount=1: None
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
        TextColumn("{task.description}"),
        BarColumn(),
        *counts,
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda amount=1: bar.advance(task, amount)
