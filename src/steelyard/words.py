"""Formats sizes, times, numbers and tables as text."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["count", "duration", "number", "size", "table_lines"]


def count(amount: int, thing: str) -> str:
    """Return a number with its noun, in the plural where needed.

    >>> count(1, "module"), count(2, "attention module")
    ('1 module', '2 attention modules')
    """
    return f"{amount} {thing}{'' if amount == 1 else 's'}"


def size(nbytes: float) -> str:
    """Return a size in a suitable unit.

    >>> size(123_400_000)
    '123.4 MB'
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "bytes" else f"{nbytes:.1f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


def duration(seconds: float, digits: int = 0) -> str:
    """Return a time in a suitable unit.

    digits: decimals of seconds; with 0, at least one second is shown

    >>> duration(300), duration(1.26, digits=1)
    ('5 min', '1.3 s')
    """
    if seconds < 120:
        return f"{seconds if digits else max(seconds, 1):.{digits}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with few digits; "-" for None.

    >>> number(0.000123456), number(4712.3)
    ('0.000123', '4712')
    """
    if value is None:
        return "-"
    return f"{value:.0f}" if 10**digits <= abs(value) < 1e6 else f"{value:.{digits}g}"


def table_lines(
    titles: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)
) -> list[str]:
    """Return the lines of a text table.

    left: left-aligned columns; the others are aligned to the right

    >>> table_lines(["module", "error"], [["a", "0.1"], ["long name", "12"]])
    ['module     error', 'a            0.1', 'long name     12']
    """
    cells = [list(titles), *(list(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(titles))]
    padded = (
        [
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        for line in cells
    )
    return ["  ".join(line).rstrip() for line in padded]
