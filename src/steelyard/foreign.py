"""Makes foreign text (names, settings, errors of libraries) safe and short enough for a message."""

from __future__ import annotations

import reprlib

__all__ = ["LONGEST", "printable", "reason_of", "show"]

LONGEST = 300
"""Maximum number of characters of foreign text in a message."""

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 100
_short.maxlevel = 3


def printable(text: str, keep: str = "") -> str:
    r"""Escape characters that a terminal would act on.

    These are control characters, direction marks, surrogates and line ends.

    keep: characters that are not escaped, such as the line ends of a message with several lines

    >>> printable("a\x1b[31mb\u202e")
    'a\\x1b[31mb\\u202e'
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in keep else _escaped(c) for c in text)


def _escaped(character: str) -> str:
    # Other spaces (no-break, ideographic) are harmless; `repr` would escape them.
    return " " if character.isspace() and ord(character) > 0x9F else repr(character)[1:-1]


def show(value: object) -> str:
    """Return a value as a short literal in printable characters.

    >>> show("x" * 1000)[:12], len(show([[1] * 1000] * 1000)) < 200
    ("'xxxxxxxxxxx", True)
    """
    return printable(_short.repr(value))


def reason_of(error: BaseException) -> str:
    """Return the message of a library's error on one short, printable line."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if len(lines) > 2 and "validation error" in lines[0]:  # pydantic: a title, place and reason
        lines = [f"{lines[1]}: {lines[2]}"]
    text = printable(" ".join(lines)) or type(error).__name__
    if isinstance(error, (LookupError, AttributeError, TypeError)) and lines:  # terse messages
        text = f"{type(error).__name__}: {text}"
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
