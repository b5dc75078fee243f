"""Lines on standard error before a run starts; warnings and errors stand out on a terminal."""

from __future__ import annotations

import sys

from steelyard.foreign import printable

__all__ = ["STYLES", "announce"]

STYLES = {"warning": "bold yellow", "error": "bold red"}
"""Style of a line, by its first word."""


def announce(text: str) -> None:
    """Print a text to standard error, without wrapping or cutting its lines."""
    text = printable(text, keep="\n")
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in text.split("\n"):
        console.print(Text(line, style=STYLES.get(line.partition(":")[0], "")))
