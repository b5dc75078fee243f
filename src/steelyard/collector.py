"""Pauses Python's garbage collector while modules are imported.

An import of torch and transformers makes a million objects that stay. The collector goes through
them again and again and finds nothing to free: a fifth of the import's time.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["paused"]


@contextlib.contextmanager
def paused() -> Iterator[None]:
    """Collect nothing inside the context; a collector that was disabled before stays so."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
