"""Descriptors of files that several threads read."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from steelyard.checkpoint.untrusted_files import open_file

__all__ = ["LARGEST_CALL", "OpenFiles"]

LARGEST_CALL = 1 << 30  # bytes read or written at once; macOS refuses 2 GiB


class OpenFiles:
    """Opens each file once, whichever thread asks first; `close` closes them all."""

    def __init__(self) -> None:
        self._handles: dict[Path, int] = {}
        self._lock = threading.Lock()

    def descriptor(self, file: Path) -> int:
        """Return a descriptor for `os.preadv`, which does not move the position threads share."""
        with self._lock:
            if file not in self._handles:
                self._handles[file] = open_file(file)
            return self._handles[file]

    def close(self) -> None:
        with self._lock:
            while self._handles:
                os.close(self._handles.popitem()[1])
