"""A registry of named classes that can list and describe its entries.

There is one instance per kind of plug-in. Names are case-insensitive and `-` equals `_`, so that
names copied from other tools' recipes match.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Generic, TypeVar

from steelyard.errors import UnknownNameError, nearest

__all__ = ["Registry", "import_all"]

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
        """Return a decorator that registers a class under `name`.

        Registering a class again under its own name replaces it (a notebook cell run twice);
        registering another class under a used name is an error.
        """
        key = _normalise(name)

        def add(entry: T) -> T:
            present = self._entries.get(key)
            if present is not None and _origin(present) != _origin(entry):
                raise ValueError(
                    f"{self.kind} {key!r} is already registered by {_origin(present)}; "
                    f"register {_origin(entry)} under another name"
                )
            self._entries[key] = entry
            return entry

        return add

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


def import_all(package: str, folder: Sequence[str]) -> None:
    """Import every module of a package, so that each registers its classes.

    folder: the package's `__path__`
    """
    for module in sorted(found.name for found in pkgutil.iter_modules(folder)):
        import_module(f"{package}.{module}")
