"""Joins names of modules that differ only in numbers: `layers.{0-3}.mlp`."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import TypeVar

__all__ = ["NUMBER", "grouped", "label_of", "targets_for"]

T = TypeVar("T")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a whole part of a dotted name


def grouped(
    items: Iterable[T], name: Callable[[T], str], alike: Callable[[T], Hashable]
) -> list[tuple[str, list[T]]]:
    """Group items whose names differ only in numbers and whose `alike` is equal.

    Groups come in order of appearance, each with its joined name.

    >>> grouped(["a.0.x", "a.1.x", "b"], name=str, alike=len)
    [('a.{0-1}.x', ['a.0.x', 'a.1.x']), ('b', ['b'])]
    """
    found: dict[tuple[str, Hashable], list[T]] = {}
    for item in items:
        found.setdefault((NUMBER.sub("#", name(item)), alike(item)), []).append(item)
    return [(label_of([name(item) for item in members]), members) for members in found.values()]


def targets_for(names: Iterable[str], others: Collection[str]) -> list[str]:
    """Return targets that match `names`, but none of `others`.

    >>> targets_for(["a.0.x", "a.1.x", "b"], others=["a.0.y"])
    ['re:.*a\\\\.\\\\d+\\\\.x$', 'b']
    """
    found: list[str] = []
    for _, members in grouped(names, name=str, alike=lambda name: None):
        numbered = r"\d+".join(map(re.escape, NUMBER.split(members[0])))
        pattern = f".*{numbered}$"
        alone = len(members) == 1 or any(re.match(pattern, other) for other in others)
        found += members if alone else [f"re:{pattern}"]
    return found


def label_of(names: Sequence[str]) -> str:
    """Return one name for several, with ranges for their numbers."""
    if len(names) == 1:
        return names[0]
    positions = list(zip(*([int(n) for n in NUMBER.findall(name)] for name in names), strict=True))
    numbers = iter(positions)

    def span(_: re.Match[str]) -> str:
        values = sorted(set(next(numbers)))
        return str(values[0]) if len(values) == 1 else f"{{{_ranges(values)}}}"

    return NUMBER.sub(span, names[0])


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
