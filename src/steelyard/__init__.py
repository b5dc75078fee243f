"""Finds the scales and zero points that store a language model's tensors in 4 or 8 bits.

The names below are imported on first use: torch and compressed-tensors take seconds to import, and
neither is needed to print a version or a help text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.aliases import install

if TYPE_CHECKING:
    from steelyard import errors, kernels, modifiers, observers
    from steelyard.entry import Oneshot, model_free_ptq, oneshot
    from steelyard.logs import LoggerConfig, configure_logger, logger
    from steelyard.observers import Observer, QParamsDict, calibration, fuse_weight_observers
    from steelyard.sessions import active_session, callbacks, create_session, reset_session

    __version__: str

install()

__all__ = [
    "LoggerConfig",
    "Observer",
    "Oneshot",
    "QParamsDict",
    "__version__",
    "active_session",
    "calibration",
    "callbacks",
    "configure_logger",
    "create_session",
    "errors",
    "fuse_weight_observers",
    "kernels",
    "logger",
    "model_free_ptq",
    "modifiers",
    "observers",
    "oneshot",
    "reset_session",
]

_SUBMODULES = frozenset({"calibration", "errors", "kernels", "modifiers", "observers"})
_HOMES = {
    "LoggerConfig": "steelyard.logs",
    "Observer": "steelyard.observers",
    "Oneshot": "steelyard.entry",
    "QParamsDict": "steelyard.observers",
    "active_session": "steelyard.sessions",
    "callbacks": "steelyard.sessions",
    "configure_logger": "steelyard.logs",
    "create_session": "steelyard.sessions",
    "fuse_weight_observers": "steelyard.observers",
    "logger": "steelyard.logs",
    "model_free_ptq": "steelyard.entry",
    "oneshot": "steelyard.entry",
    "reset_session": "steelyard.sessions",
}


def __getattr__(name: str) -> object:
    from importlib import import_module, metadata

    from steelyard.collector import paused

    value: object
    if name in _SUBMODULES:
        with paused():
            value = import_module(f"steelyard.{name}")
    elif name in _HOMES:
        with paused():
            value = getattr(import_module(_HOMES[name]), name)
    elif name in ("__version__", "version"):
        value = metadata.version("steelyard")
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
