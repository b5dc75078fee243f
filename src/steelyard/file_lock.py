"""Locks on open files, which end with the process that holds them."""

from __future__ import annotations

import os

__all__ = ["lock_file"]


def lock_file(handle: int, holder: int | None) -> None:
    """Lock an open file until it is closed; raise BlockingIOError while another process holds it.

    holder: process that the file, or its name, says holds it. It decides where the system has no
            `fcntl`: the file counts as locked while that process lives.
    """
    try:
        import fcntl
    except ImportError:
        import psutil

        if holder is not None and holder != os.getpid() and psutil.pid_exists(holder):
            raise BlockingIOError(f"process {holder} holds it") from None
    else:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
