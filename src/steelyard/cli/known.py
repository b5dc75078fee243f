"""Names that can be completed and checked without importing torch.

A test compares the lists with the registries. An older compressed-tensors has fewer schemes; the
others are refused when the recipe is built.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from steelyard.errors import nearest

__all__ = ["KINDS", "OBSERVERS", "PIPELINES", "SCHEMES", "UNCALIBRATED", "completing", "one_of"]

OBSERVERS = (
    "imatrix_mse",
    "memoryless_minmax",
    "memoryless_mse",
    "minmax",
    "mse",
    "nvfp4_expanded_imatrix",
    "nvfp4_expanded_mse",
    "optimal",
    "static_minmax",
)
SCHEMES = (
    "FP8",
    "FP8_BLOCK",
    "FP8_DYNAMIC",
    "INT8",
    "MXFP4",
    "MXFP4A16",
    "MXFP4XFP8",
    "MXFP6A16",
    "MXFP6A8",
    "MXFP8",
    "MXFP8A16",
    "NVFP4",
    "NVFP4A16",
    "W2A16",
    "W2A4",
    "W2A8",
    "W3A16",
    "W3A4",
    "W3A8",
    "W4A16",
    "W4A16_ASYM",
    "W4A4",
    "W4A8",
    "W4AFP8",
    "W5A16",
    "W5A8",
    "W6A16",
    "W6A8",
    "W7A16",
    "W7A8",
    "W8A16",
    "W8A8",
)
PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")
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


def completing(names: Iterable[str]) -> Callable[[str], list[str]]:
    """Return a function that completes the last of several names separated by commas."""
    known = list(names)

    def complete(incomplete: str) -> list[str]:
        before, comma, last = incomplete.rpartition(",")
        return [f"{before}{comma}{name}" for name in known if name.startswith(last)]

    return complete
