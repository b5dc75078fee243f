"""Lines on standard error before a run starts; warnings and errors stand out on a terminal."""

from __future__ import annotations

import sys

from steelyard.foreign import printable

__all__ = ["STYLES", "announce"]

STYLES = {"warning": "bold yellow", "error": "bold red"}
"""How a line is shown, by the word that it begins with."""


def announce(text: str) -> None:
    """Print a text; its lines are never cut."""
    text = printable(text, keep="\n")
    if not sys.stderr.isatty():
        print(text, file=sys.stderr)
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for line in text.split("\n"):
        console.print(Text(line, style=STYLES.get(line.partition(":")[0], "")))
