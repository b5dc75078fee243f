"""Joins lines on modules that differ only in numbers, and filters modules by name."""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable

import typer

from steelyard.model.module_names import NUMBER, label_of

__all__ = ["joined_lines", "matching"]

SECONDS = 2  # limit for matching one name
_LINE = re.compile(
    r"(?P<head>\s*(?:- |error: |problem: |warning: ))(?P<name>[\w.]+)(?P<rest>:? .*|)"
)


def joined_lines(text: str) -> str:
    """Join the lines of a text that are equal but for numbers in a module's name.

    >>> joined_lines("  - a.0.b: too long\\n  - a.1.b: too long")
    '  - a.{0-1}.b: too long (2 modules)'
    """
    lines: dict[tuple[str, str, str], list[str]] = {}
    for i, line in enumerate(text.split("\n")):
        match = _LINE.fullmatch(line)
        if match is None or not NUMBER.search(match["name"]):
            lines[(str(i), line, "")] = []
            continue
        key = (match["head"], NUMBER.sub("#", match["name"]), match["rest"])
        lines.setdefault(key, []).append(match["name"])
    joined = []
    for key, names in lines.items():
        if not names:
            joined.append(key[1])
            continue
        count = f" ({len(names)} modules)" if len(names) > 1 else ""
        joined.append(f"{key[0]}{label_of(names)}{key[2]}{count}")
    return "\n".join(joined)


def matching(pattern: str | None) -> Callable[[str], bool]:
    """Return a predicate that says whether a name matches.

    pattern: "re:" and a regular expression for the start of the name, as in a recipe; a shell
             pattern for the whole name; or a part of the name
    """
    if pattern is None:
        return lambda name: True
    if pattern.startswith("re:"):
        return _expression(pattern)
    if any(c in pattern for c in "*?["):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return lambda name: pattern in name


def _expression(pattern: str) -> Callable[[str], bool]:
    """Return a predicate for a regular expression, with a time limit."""
    regex = importlib.import_module("regex")  # unlike `re`, it has a timeout
    try:
        expression = regex.compile(pattern.removeprefix("re:"))
    except (regex.error, RecursionError, OverflowError) as error:
        raise typer.BadParameter(f"{pattern!r} is not a regular expression: {error}") from None

    def matches(name: str) -> bool:
        try:
            return expression.match(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise typer.BadParameter(
                f"matching {pattern!r} against {name} takes longer than {SECONDS} s; write it "
                "without a repetition inside a repetition, such as (.*)*"
            ) from None

    return matches
