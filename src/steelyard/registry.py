"""A registry that can be asked what it holds.

One instance per kind of thing (observers today). Names are compared without regard to case, and
`-` equals `_`, so that a name copied from a recipe of another tool is found.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from steelyard.errors import UnknownNameError, nearest

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Generic[T]):
    """Named classes or functions of one kind.

    Example::

        observers = Registry("observer")

        @observers.register("mine")
        class Mine: ...

        observers.get("mine") is Mine
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that enters a class under `name`.

        Entering a class again under its own name replaces it (a notebook cell run twice); taking
        a name away from another class is an error.
        """
        key = _normalise(name)

        def enter(entry: T) -> T:
            present = self._entries.get(key)
            if present is not None and _origin(present) != _origin(entry):
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by {_origin(present)}; "
                    f"register {_origin(entry)} under another name"
                )
            self._entries[key] = entry
            return entry

        return enter

    def get(self, name: str) -> T:
        try:
            return self._entries[_normalise(name)]
        except KeyError:
            hint = nearest(_normalise(name), self._entries)
            raise UnknownNameError(f"no {self.kind} is registered as {name!r}: {hint}") from None

    def names(self) -> list[str]:
        return sorted(self._entries)

    def describe(self) -> dict[str, str]:
        """Return each name with the first line of its docstring."""
        return {
            name: (getattr(self._entries[name], "__doc__", None) or "").strip().split("\n")[0]
            for name in self.names()
        }

    def __contains__(self, name: str) -> bool:
        return _normalise(name) in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self.names())


def _normalise(name: str) -> str:
    return name.strip().lower().replace("-", "_").replace(" ", "_")


def _origin(entry: object) -> str:
    module = getattr(entry, "__module__", type(entry).__module__)
    return f"{module}.{getattr(entry, '__qualname__', repr(entry))}"
