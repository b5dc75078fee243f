"""CRC-32, at a tenth of zlib's time where the processor has carry-less products."""

from __future__ import annotations

import zlib
from typing import Any

from steelyard.kernels.backend import extension, resolve

__all__ = ["crc32"]


def crc32(data: Any, crc: int = 0) -> int:
    """Return zlib's CRC-32 of a buffer of bytes.

    crc: of the bytes before it

    >>> crc32(b"789", crc32(b"123456")) == crc32(b"123456789") == 0xCBF43926
    True
    """
    native, _ = extension()
    if native is not None and len(data) >= 64 and resolve() != "reference":
        found = native.crc32(memoryview(data), crc)
        if found is not None:
            return int(found)
    return zlib.crc32(data, crc)
