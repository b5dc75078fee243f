"""Ending a run in the middle, in this process, as a kill would."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from steelyard.checkpoint import CheckpointWriter


class Stop(BaseException):
    """Nobody catches it but the test."""


@contextmanager
def small_steps() -> Iterator[None]:
    """Let runs mark after every step, and write shards of a few tensors."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CheckpointWriter, "mark_seconds", 0.0)
        patch.setitem(CheckpointWriter.__init__.__kwdefaults__, "max_shard_bytes", 100_000)
        yield


def stop_at_mark(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let a run end right after it has recorded its `count`-th mark."""
    mark, calls = CheckpointWriter.mark, [0]

    def stopping(self: CheckpointWriter, *args: Any) -> None:
        mark(self, *args)
        calls[0] += 1
        if calls[0] == count:
            raise Stop

    patch.setattr(CheckpointWriter, "mark", stopping)


_TIMES = re.compile(rb'"seconds":[^"]*"peak_memory":[^"]*"created":"[^"]*"')
_CONTINUED = re.compile(rb',?"resumed after \d+ modules? of an earlier run"')


def lasting(file: Path) -> bytes:
    """Return what a file holds, but for what a report tells of the time and of interruptions."""
    content = file.read_bytes()
    if file.name in ("report.json", "report.html"):
        content, times = _TIMES.subn(b"", content)
        assert times == 1
        content = _CONTINUED.sub(b"", content).replace(b'"notes":[,', b'"notes":[')
    return content
