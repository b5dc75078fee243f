"""CRC-32 by carry-less products is zlib's."""

from __future__ import annotations

import random
import zlib

import pytest

from steelyard.kernels.checksum import crc32


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 127, 128, 191, 192, 1000, 4096, 70_001])
@pytest.mark.parametrize("start", [0, 3, 16])
def test_checksum_is_that_of_zlib(size: int, start: int) -> None:
    chance = random.Random(size)
    data = bytearray(chance.randbytes(start + size))
    view = memoryview(data)[start:]
    for before in (0, 1, 0xFFFFFFFF, chance.getrandbits(32)):
        assert crc32(view, before) == zlib.crc32(view, before)
        assert crc32(bytes(view), before) == zlib.crc32(view, before)


def test_parts_add_up() -> None:
    data = random.Random(1).randbytes(10_000)
    for cut in (0, 10, 64, 5_000, 9_999):
        assert crc32(data[cut:], crc32(data[:cut])) == zlib.crc32(data)


def test_reference_is_zlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    assert crc32(b"123456789" * 20) == zlib.crc32(b"123456789" * 20)
