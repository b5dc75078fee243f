"""Finds the scales and zero points that store a language model's tensors in 4 or 8 bits.

The names below are imported on first use: torch and compressed-tensors take seconds to import, and
neither is needed to print a version or a help text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.aliases import install

if TYPE_CHECKING:
    from steelyard import errors, kernels, modifiers, observers
    from steelyard.entry import oneshot
    from steelyard.observers import Observer, QParamsDict, calibration, fuse_weight_observers

    __version__: str

install()

__all__ = [
    "Observer",
    "QParamsDict",
    "__version__",
    "calibration",
    "errors",
    "fuse_weight_observers",
    "kernels",
    "modifiers",
    "observers",
    "oneshot",
]

_SUBMODULES = frozenset({"calibration", "errors", "kernels", "modifiers", "observers"})
_HOMES = {
    "Observer": "steelyard.observers",
    "QParamsDict": "steelyard.observers",
    "fuse_weight_observers": "steelyard.observers",
    "oneshot": "steelyard.entry",
}


def __getattr__(name: str) -> object:
    from importlib import import_module, metadata

    value: object
    if name in _SUBMODULES:
        value = import_module(f"steelyard.{name}")
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name == "__version__":
        value = metadata.version("steelyard")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
