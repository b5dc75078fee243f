"""Locates a value in a recipe, and names the file, line and key in errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from steelyard.errors import RecipeError

__all__ = ["KeyPath", "Problem", "RecipeText"]

KeyPath = tuple[str | int, ...]
"""The keys and indices that lead to a value."""

Problem = tuple[KeyPath, str]
"""The location of a mistake, and its description."""


@dataclass(frozen=True)
class RecipeText:
    """The content of a recipe and its origin.

    name:  the file, or None for values passed from Python
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
        lines = [
            ": ".join(part for part in (self._place(path), _dotted(path), text) if part)
            for path, text in ordered
        ]
        return RecipeError("\n".join(dict.fromkeys(lines)))

    def _place(self, path: KeyPath) -> str:
        if self.name is None:
            return ""
        line = self._line(path)
        return f"{self.name}:{line}" if line else self.name

    def _line(self, path: KeyPath) -> int:
        """Return the line of `path`, or of its nearest parent that has one."""
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
