"""Names that can be completed and checked without importing torch.

A test compares the lists with the registries. An older compressed-tensors has fewer schemes; the
others are refused when the recipe is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from steelyard.errors import nearest

__all__ = ["KINDS", "PIPELINES", "UNCALIBRATABLE", "UNCALIBRATED", "completing", "one_of"]

PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")
UNCALIBRATABLE = ("note", "dynamic", "leave")
KINDS = ("observers", "schemes", "strategies")


def one_of(what: str, value: str, known: Iterable[str]) -> str:
    """Return the known name that equals `value` but for case; refuse any other."""
    known = list(known)
    by_lower = {name.lower(): name for name in known}
    wanted = value.strip().lower()
    found = by_lower.get(wanted) or by_lower.get(wanted.replace("-", "_"))
    if found is None:
        close = nearest(value.strip().upper() if known[0].isupper() else wanted, known)
        raise typer.BadParameter(f"there is no {what} {value!r}: {close}")
    return found


def completing(names: Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """Return a function that completes the last of several names separated by commas."""

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in names() if name.startswith(last)]

    return complete
