"""One safetensors file, written tensor by tensor, and resumed after a crash.

The format starts with a header of offsets, so writers usually gather all tensors first. This one
reserves room for the header, which may be padded with spaces, and writes the bytes at once. A
tensor must start at a multiple of its element's size: those of odd sizes, which are small, are
written last.

The complete file is read back from disk and must have the checksum of the bytes written.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.header import DTYPE_NAMES
from steelyard.checkpoint.open_files import LARGEST_CALL
from steelyard.errors import CheckpointError
from steelyard.kernels.checksum import crc32

__all__ = ["HEADER_ROOM", "ShardFile", "checksum", "entry_bytes", "is_whole"]

HEADER_ROOM = 1 << 18  # for the header; enough for some 1,500 tensors
_DATA = 8 + HEADER_ROOM
_ALIGNED = 8
_PIECE = 1 << 24


class ShardFile:
    """A shard; keeps only tensors in memory whose size is not a multiple of 8 bytes.

    state: result of `state()` to resume from
    """

    def __init__(self, path: Path, state: dict[str, Any] | None = None) -> None:
        self.path = path
        self.names: list[str] = []
        self.nbytes = 0
        self._written = 0
        self._crc = 0
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, tuple[str, list[int], bytes]] = {}
        self._header = 64  # bytes at most
        if state is None:
            path.unlink(missing_ok=True)  # of a run that was killed
        flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | (0 if state else os.O_EXCL)
        self._handle = os.open(path, flags, 0o666)
        if state is not None:
            self._restore(state)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Write a tensor that is contiguous and on the CPU."""
        self.add_pieces(name, tensor.dtype, tuple(tensor.shape), [_bytes_of(tensor)])

    def add_pieces(
        self, name: str, dtype: torch.dtype, shape: tuple[int, ...], pieces: Iterable[Any]
    ) -> None:
        """Write a tensor whose bytes come in pieces; none is kept in memory."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self.names.append(name)
        self._header += entry_bytes(name, len(shape))
        self.nbytes += nbytes
        if nbytes % _ALIGNED:
            self._waiting[name] = (DTYPE_NAMES[dtype], list(shape), b"".join(pieces))
        else:
            self._write(name, DTYPE_NAMES[dtype], list(shape), pieces)

    def _write(self, name: str, dtype: str, shape: list[int], pieces: Iterable[Any]) -> None:
        start = self._written
        for piece in pieces:
            self._put(piece, _DATA + self._written)
            self._crc = crc32(piece, self._crc)
            self._written += len(piece)
        place = [start, self._written]
        self._entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": place}

    def _put(self, data: Any, offset: int) -> None:
        view, done = memoryview(data), 0
        try:
            while done < len(view):
                done += os.pwrite(self._handle, view[done : done + LARGEST_CALL], offset + done)
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror}; make room or choose another "
                "disk. The same command resumes from its last mark"
            ) from error

    def has_room(self, name: str, dimensions: int) -> bool:
        """Whether the header can name one more tensor; a file can always hold one."""
        return not self.names or self._header + entry_bytes(name, dimensions) <= HEADER_ROOM

    # -- resuming -----------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state to resume from, in JSON's types; the bytes are on disk."""
        os.fsync(self._handle)
        waiting = {
            n: [d, s, base64.b64encode(b).decode()] for n, (d, s, b) in self._waiting.items()
        }
        return {
            "names": self.names,
            "nbytes": self.nbytes,
            "written": self._written,
            "crc": self._crc,
            "header": self._header,
            "entries": self._entries,
            "waiting": waiting,
        }

    def _restore(self, state: dict[str, Any]) -> None:
        self.names = list(state["names"])
        self.nbytes = state["nbytes"]
        self._written = state["written"]
        self._crc = state["crc"]
        self._header = state["header"]
        self._entries = dict(state["entries"])
        for name, (dtype, shape, data) in state["waiting"].items():
            self._waiting[name] = (dtype, shape, base64.b64decode(data))
        end = _DATA + self._written
        if checksum(self.path, _DATA, end) != self._crc:
            raise CheckpointError(
                f"{self.path} was changed after the run stopped; start anew with resume=False"
            )
        os.ftruncate(self._handle, end)

    # -- the end ------------------------------------------------------------------------------

    def close(self) -> dict[str, int]:
        """Write waiting tensors and the header, read all back, return a record for `is_whole`."""
        itemsize = {name: dtype.itemsize for dtype, name in DTYPE_NAMES.items()}
        for name, (dtype, shape, data) in sorted(
            self._waiting.items(), key=lambda item: -itemsize[item[1][0]]
        ):
            self._write(name, dtype, shape, [data])
        self._waiting.clear()
        content = {"__metadata__": {"format": "pt"}, **self._entries}
        header = json.dumps(content, separators=(",", ":")).encode()
        header = HEADER_ROOM.to_bytes(8, "little") + header.ljust(HEADER_ROOM)
        assert len(header) == _DATA, "has_room was not asked"
        self._put(header, 0)
        os.fsync(self._handle)
        if hasattr(os, "posix_fadvise"):  # so that the disk is read, not the cache
            os.posix_fadvise(self._handle, 0, 0, os.POSIX_FADV_DONTNEED)
        self.abandon()
        sums = {"header": len(header), "header_crc": crc32(header), "crc": self._crc}
        record = {**sums, "size": len(header) + self._written}
        if not is_whole(self.path, record):
            raise CheckpointError(
                f"{self.path} does not hold the bytes written to it; the disk may be failing"
            )
        return record

    def abandon(self) -> None:
        """Close the file without completing it."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


def entry_bytes(name: str, dimensions: int) -> int:
    """Return the most bytes that a tensor takes in the header."""
    return len(json.dumps(name)) + 22 * dimensions + 96


def is_whole(path: Path, record: dict[str, int]) -> bool:
    """Whether a file is unchanged since `close` returned `record`."""
    if not path.is_file() or path.stat().st_size != record["size"]:
        return False
    start = record["header"]
    if checksum(path, 0, start) != record["header_crc"]:
        return False
    return checksum(path, start, record["size"]) == record["crc"]


def checksum(path: Path, start: int, end: int) -> int:
    """Return the CRC-32 of the bytes `start` to `end` of a file, or to its end."""
    crc = 0
    handle = os.open(path, os.O_RDONLY)
    try:
        for piece in _pieces(handle, start, end):
            crc = crc32(piece, crc)
    finally:
        os.close(handle)
    return crc


def _pieces(handle: int, start: int, end: int) -> Iterator[memoryview]:
    """Yield the bytes `start` to `end` of a file; each piece is overwritten by the next."""
    buffer = memoryview(bytearray(min(_PIECE, max(end - start, 1))))
    while start < end:
        got = os.preadv(handle, [buffer[: min(len(buffer), end - start)]], start)
        if got == 0:
            return
        yield buffer[:got]
        start += got


def _bytes_of(tensor: torch.Tensor) -> Any:
    if not tensor.nbytes:
        return b""
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
