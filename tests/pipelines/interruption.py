"""Ending a run in the middle, in this process, as a kill would."""

from __future__ import annotations

from typing import Any

import pytest

from steelyard.checkpoint import CheckpointWriter


class Stop(BaseException):
    """Nobody catches it but the test."""


def stop_at_mark(patch: pytest.MonkeyPatch, count: int) -> None:
    """Let a run end right after it has recorded its `count`-th mark."""
    mark, calls = CheckpointWriter.mark, [0]

    def stopping(self: CheckpointWriter, progress: dict[str, Any]) -> None:
        mark(self, progress)
        calls[0] += 1
        if calls[0] == count:
            raise Stop

    patch.setattr(CheckpointWriter, "mark", stopping)
