"""A progress bar with an estimate, on a terminal; silence elsewhere."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

__all__ = ["progress"]


@contextlib.contextmanager
def progress(label: str, total: int, show: bool | None = None) -> Iterator[Callable[[], None]]:
    """Yield a function that advances the bar by one.

    show: None shows it where standard error is a terminal
    """
    if show is None:
        show = sys.stderr.isatty()
    if not show or total < 1:
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(file=sys.stderr),
    ) as bar:
        task = bar.add_task(label, total=total)
        yield lambda: bar.advance(task)
