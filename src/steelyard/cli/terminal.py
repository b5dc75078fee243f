"""Prints tables for people and JSON documents for programs.

On a terminal, long cells are folded to fit a table to its width. Elsewhere every row is one line,
never truncated, without colours or frames.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from steelyard import words
from steelyard.cli.rank_streams import is_first
from steelyard.foreign import printable
from steelyard.words import number, size, table_lines

__all__ = [
    "SCHEMA",
    "Column",
    "duration",
    "number",
    "print_document",
    "print_line",
    "print_table",
    "shape_text",
    "size",
]

SCHEMA = 1
"""Version of the `--json` documents; incremented when a field changes its meaning."""


class Column(NamedTuple):
    title: str
    right: bool = False


def print_document(command: str, content: dict[str, Any]) -> None:
    """Print one JSON document; NaN and infinities become null."""
    if is_first():
        document = {"schema": SCHEMA, "command": command, **content}
        print(json.dumps(_plain(document), indent=2, allow_nan=False))


def print_line(text: str = "", style: str | None = None) -> None:
    """Print a line without wrapping, in a style on a terminal."""
    if not is_first():
        return
    text = printable(text, keep="\n")
    if style is None or not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.text import Text

    Console(highlight=False, soft_wrap=True).print(Text(text, style=style))


def print_table(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    if not is_first():
        return
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        _print_rich(columns, rows)
        return
    left = [i for i, column in enumerate(columns) if not column.right]
    for line in table_lines([column.title for column in columns], rows, left):
        print(line)


def _print_rich(columns: Sequence[Column], rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for i, column in enumerate(columns):
        table.add_column(
            Text(column.title),
            justify="right" if column.right else "left",
            no_wrap=column.right,
            overflow="fold",
            style="cyan" if i == 0 else None,
        )
    for row in rows:
        table.add_row(*(Text(cell) for cell in row))
    Console(highlight=False).print(table)


def shape_text(shape: Sequence[int] | None) -> str:
    return "-" if shape is None else "x".join(map(str, shape)) or "scalar"


def duration(seconds: float) -> str:
    return words.duration(seconds, digits=1)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
