"""Returns freed memory to the system, where that is worth its price.

glibc keeps what is freed: several layers' worth. What it returns costs a page fault for each 4 KiB
when it is needed again, so a small amount is kept.
"""

from __future__ import annotations

import contextlib
import ctypes

__all__ = ["return_memory"]

_KEPT = 256 << 20  # bytes; a tenth of a second of page faults


class _Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = [(f"field_{i}", ctypes.c_size_t) for i in range(8)]
    _fields_ += [("free", ctypes.c_size_t), ("at_top", ctypes.c_size_t)]


def return_memory() -> None:
    """Return freed memory to the system if there is much of it."""
    with contextlib.suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        if _freed(library) > _KEPT:
            library.malloc_trim(0)


def _freed(library: ctypes.CDLL) -> int:
    """Return the bytes that malloc holds free; all there may be if the library cannot tell."""
    try:
        told = library.mallinfo2
    except AttributeError:  # before glibc 2.33
        return _KEPT + 1
    told.restype = _Mallinfo
    return int(told().free)
