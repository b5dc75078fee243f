"""Keeps Python's garbage collector from modules: during imports, during a run, and at the end.

An import of torch and transformers makes a million objects that stay. The collector goes through
them again and again and finds nothing to free: a fifth of the import's time, and a twentieth of a
short run's. As the process ends, it goes through them twice; once is left out.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
from collections.abc import Iterator

__all__ = ["passing_over", "paused"]


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
        atexit.unregister(gc.disable)  # registered once, however often this runs
        atexit.register(gc.disable)


@contextlib.contextmanager
def passing_over() -> Iterator[None]:
    """Collect only objects that were made inside the context; no effect where some are frozen."""
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
