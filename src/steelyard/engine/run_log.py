"""Writes a log file of a run: when it began, plan, notes, result or error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from torch import distributed as dist

from steelyard.engine.result import Result
from steelyard.errors import OutputError

__all__ = ["RunLog", "run_log"]


class RunLog:
    """A log file; without a path, nothing is written."""

    def __init__(self, path: Path | None) -> None:
        self.path = path

    def add(self, text: str) -> None:
        if self.path is None:
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now().isoformat(timespec='seconds')} {text}\n")

    def finish(self, result: Result) -> None:
        self.add(f"plan\n{result.plan}")
        for note in result.notes:
            self.add(f"note: {note}")
        self.add(f"finished\n{result}")


@contextlib.contextmanager
def run_log(folder: str | Path | None) -> Iterator[RunLog]:
    """Log a run to a new file in a folder; only the first rank does."""
    log = RunLog(None)
    if folder is not None and _is_first():
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
            stem = f"oneshot_{datetime.now().strftime('%Y-%m-%d_%H-%M-%S')}"
            log = RunLog(_free(Path(folder), stem))
            log.add("started")
        except OSError as error:
            raise OutputError(f"log_dir={str(folder)!r}: {error.strerror or error}") from error
    try:
        yield log
    except BaseException as error:
        log.add(f"failed: {type(error).__name__}: {error}")
        raise


def _is_first() -> bool:
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def _free(folder: Path, stem: str) -> Path:
    """Return a path that does not exist yet: two runs may start in one second."""
    names = (f"{stem}{f'_{i}' if i else ''}.log" for i in range(1000))
    return next(path for name in names if not (path := folder / name).exists())
