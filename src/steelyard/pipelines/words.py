"""Sizes in words, the same in a plan and on the command line."""

from __future__ import annotations

__all__ = ["size"]


def size(nbytes: float) -> str:
    """Return a size in a unit that suits it.

    >>> size(123_400_000)
    '123.4 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"
