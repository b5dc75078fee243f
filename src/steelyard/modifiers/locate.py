"""Where in a recipe a thing stands, and how that is told."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.errors import RecipeError

__all__ = ["KeyPath", "Problem", "Source"]

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

Problem = tuple[KeyPath, str]
"""What is wrong, and where."""


@dataclass(frozen=True)
class Source:
    """Plain values and where they came from.

    name:  the file, or None for values given in Python
    lines: the line of each key and item, counted from 1
    """

    value: Any
    name: str | None = None
    lines: Mapping[KeyPath, int] = field(default_factory=dict)

    def refuse(self, problems: list[Problem]) -> RecipeError:
        """Return an error with one line for each problem, in the order of the recipe.

        >>> str(source.refuse([(("modifiers", 0, "scheme"), "there is no scheme 'W4'")]))
        "recipe.yaml:7: modifiers[0].scheme: there is no scheme 'W4'"
        """
        ordered = sorted(problems, key=lambda problem: self._line(problem[0]))
        told = [
            ": ".join(part for part in (self._place(path), _dotted(path), text) if part)
            for path, text in ordered
        ]
        return RecipeError("\n".join(dict.fromkeys(told)))

    def _place(self, path: KeyPath) -> str:
        if self.name is None:
            return ""
        line = self._line(path)
        return f"{self.name}:{line}" if line else self.name

    def _line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of the nearest thing around it that has one."""
        while path and path not in self.lines:
            path = path[:-1]
        return self.lines.get(path, 0)


def _dotted(path: KeyPath) -> str:
    """
    >>> _dotted(("modifiers", 0, "scheme"))
    'modifiers[0].scheme'
    """
    text = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return text.removeprefix(".")
