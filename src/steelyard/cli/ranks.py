"""Under torchrun every process runs the same command; the first one speaks."""

from __future__ import annotations

import os

__all__ = ["is_first", "rank"]


def rank() -> int:
    """Return the number that torchrun gave this process, or 0."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_first() -> bool:
    return rank() == 0
