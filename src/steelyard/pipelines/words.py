"""Sizes and times in words, the same in a plan and on the command line."""

from __future__ import annotations

__all__ = ["duration", "size"]


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


def duration(seconds: float, digits: int = 0) -> str:
    """Return a time in a unit that suits it.

    digits: of seconds, after the point; without any, it is one second at least

    >>> duration(300), duration(1.26, digits=1)
    ('5 min', '1.3 s')
    """
    if seconds < 120:
        return f"{seconds if digits else max(seconds, 1):.{digits}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
