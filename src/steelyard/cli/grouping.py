"""Names that differ only in numbers, on one line, so that a thousand modules fit a screen."""

from __future__ import annotations

import fnmatch
import importlib
import re
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import TypeVar

import typer

__all__ = ["grouped", "joined_lines", "matching"]

T = TypeVar("T")
SECONDS = 2  # that an expression may take for a name
_LINE = re.compile(
    r"(?P<head>\s*(?:- |error: |problem: |warning: ))(?P<name>[\w.]+)(?P<rest>:? .*|)"
)
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


def grouped(
    items: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Return items by their names without numbers, where `alike` is equal, in order of appearance.

    >>> grouped(["a.0.x", "a.1.x", "b"], name=str, alike=len)
    [('a.{0-1}.x', ['a.0.x', 'a.1.x']), ('b', ['b'])]
    """
    found: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        found.setdefault((_NUMBER.sub("#", name(item)), alike(item)), []).append(item)
    return [(_label([name(item) for item in members]), members) for members in found.values()]


def joined_lines(text: str) -> str:
    """Return a text in which lines that say the same of several modules are one.

    >>> joined_lines("  - a.0.b: too long\\n  - a.1.b: too long")
    '  - a.{0-1}.b: too long (2 modules)'
    """
    lines: dict[tuple[str, str, str], list[str]] = {}
    for i, line in enumerate(text.split("\n")):
        match = _LINE.fullmatch(line)
        if match is None or not _NUMBER.search(match["name"]):
            lines[(str(i), line, "")] = []
            continue
        key = (match["head"], _NUMBER.sub("#", match["name"]), match["rest"])
        lines.setdefault(key, []).append(match["name"])
    joined = []
    for key, names in lines.items():
        if not names:
            joined.append(key[1])
            continue
        count = f" ({len(names)} modules)" if len(names) > 1 else ""
        joined.append(f"{key[0]}{_label(names)}{key[2]}{count}")
    return "\n".join(joined)


def _label(names: Sequence[str]) -> str:
    if len(names) == 1:
        return names[0]
    positions = list(zip(*([int(n) for n in _NUMBER.findall(name)] for name in names), strict=True))
    numbers = iter(positions)

    def span(_: re.Match[str]) -> str:
        values = sorted(set(next(numbers)))
        return str(values[0]) if len(values) == 1 else f"{{{_ranges(values)}}}"

    return _NUMBER.sub(span, names[0])


def _ranges(values: Sequence[int]) -> str:
    """Return sorted numbers as ranges.

    >>> _ranges([0, 1, 2, 5, 7, 8])
    '0-2,5,7,8'
    """
    runs: list[list[int]] = []
    for value in values:
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    spans = (
        f"{run[0]}-{run[-1]}" if len(run) > 2 or len(runs) == 1 else ",".join(map(str, run))
        for run in runs
    )
    return ",".join(spans)


def matching(pattern: str | None) -> Callable[[str], bool]:
    """Return whether a name is wanted.

    pattern: "re:" and an expression that the name starts with, as in a recipe; a shell pattern for
             the whole name; or a part of it
    """
    if pattern is None:
        return lambda name: True
    if pattern.startswith("re:"):
        return _expression(pattern)
    if any(c in pattern for c in "*?["):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return lambda name: pattern in name


def _expression(pattern: str) -> Callable[[str], bool]:
    """Return whether a name matches a regular expression, in a second or not at all."""
    regex = importlib.import_module("regex")  # unlike `re`, it can be stopped
    try:
        expression = regex.compile(pattern.removeprefix("re:"))
    except (regex.error, RecursionError, OverflowError) as error:
        raise typer.BadParameter(f"{pattern!r} is no expression: {error}") from None

    def matches(name: str) -> bool:
        try:
            return expression.match(name, timeout=SECONDS) is not None
        except TimeoutError:
            raise typer.BadParameter(
                f"matching {pattern!r} against {name} takes longer than {SECONDS} s; write it "
                "without a repetition inside a repetition, such as (.*)*"
            ) from None

    return matches
