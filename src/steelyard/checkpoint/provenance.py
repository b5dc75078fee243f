"""`provenance.json`: the source of a checkpoint, and a digest of every file in it.

It is written last. It holds no time and no path, so the same run writes the same bytes. Files that
may be edited later have no digest. `changed` lists the tensors that the run changed before or
without quantizing them; it is absent if there are none.

    {"schema_version": 1, "steelyard": "0.4.0",
     "source": {"config.json": {"bytes": 654, "sha256": "..."},
                "model.safetensors": {"bytes": 269060552, "header_sha256": "..."}},
     "files": {"config.json": {"bytes": 1820, "sha256": "..."},
               "model.safetensors": {"bytes": 95123456, "sha256": "...",
                                     "tensors": {"model.norm.weight": "1f0c93ab"}}},
     "mutable": ["README.md", "report.html", "report.json"],
     "changed": ["model.norm.weight"]}

`tensors` are CRC-32: they tell which tensor changed in a file whose SHA-256 no longer matches.
"""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.atomic_file import write_atomic
from steelyard.checkpoint.config_file import CONFIG
from steelyard.checkpoint.header import read_header
from steelyard.checkpoint.untrusted_files import mode_of, open_file, read_json, unreadable
from steelyard.errors import CheckpointError

__all__ = [
    "MUTABLE",
    "PROVENANCE",
    "FileDigest",
    "Provenance",
    "file_digest",
    "hashing_threads",
    "read_provenance",
    "source_of",
    "write_provenance",
]

PROVENANCE = "provenance.json"
SCHEMA_VERSION = 1
MUTABLE = (".gitattributes", "README.md", "report.html", "report.json")
_PIECE = 1 << 22
_THREADS = 8  # hashing one file takes one thread


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class FileDigest(_Strict):
    """Size and digest of a file, and of each tensor if it holds tensors."""

    bytes: int
    sha256: str
    tensors: dict[str, str] | None = None
    """Name -> CRC-32 of its bytes, in hexadecimal digits."""


class SourceFile(_Strict):
    """A file of the source: config.json by its content, weights by size and header."""

    bytes: int
    sha256: str | None = None
    header_sha256: str | None = None


class Provenance(_Strict):
    """The content of `provenance.json`.

    source:  None where a loaded model was quantized
    mutable: files that may change later, such as the report, which `evaluate` updates
    changed: tensors that differ from the source's because a step of the recipe changed them
    """

    schema_version: int = SCHEMA_VERSION
    steelyard: str
    source: dict[str, SourceFile] | None = None
    files: dict[str, FileDigest]
    mutable: list[str] = Field(default_factory=lambda: list(MUTABLE))
    changed: list[str] | None = None

    @classmethod
    def of(cls, folder: Path, source: Path | None, changed: Iterable[str] = ()) -> Provenance:
        """Return the provenance of a complete checkpoint; large files are hashed in parallel."""
        names = sorted(
            str(path.relative_to(folder).as_posix())
            for path in folder.rglob("*")
            if path.is_file() and path.name != PROVENANCE
        )
        names = [name for name in names if name not in MUTABLE]
        with hashing_threads() as pool:
            digests = pool.map(file_digest, [folder / name for name in names])
            files = dict(zip(names, digests, strict=True))
        origin = None if source is None else source_of(source)
        return cls(
            steelyard=_version(), source=origin, files=files, changed=sorted(changed) or None
        )

    def to_json(self) -> str:
        return self.model_dump_json(indent=1, exclude_none=True) + "\n"


def write_provenance(folder: Path, source: Path | None, changed: Iterable[str] = ()) -> None:
    """Write `provenance.json` into a complete checkpoint, and wait until it is on the disk."""
    write_atomic(folder / PROVENANCE, Provenance.of(folder, source, changed).to_json())


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of a checkpoint; None where it has none."""
    path = folder / PROVENANCE
    if not mode_of(path):
        return None
    try:
        content = read_json(path)
        found = content.get("schema_version") if isinstance(content, dict) else None
        if found != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {found!r}, known is {SCHEMA_VERSION}")
        return Provenance.model_validate(content)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise CheckpointError(f"{path} is damaged at {place}: {first['msg']}") from None
    except ValueError as error:
        raise CheckpointError(f"{path} cannot be used: {error}") from None


def hashing_threads() -> ThreadPoolExecutor:
    """Return a thread pool that hashes files in parallel."""
    return ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))


def file_digest(path: Path, advance: Callable[[int], Any] = lambda _: None) -> FileDigest:
    """Read a file once and return its digest.

    advance: called with the number of bytes of each piece
    """
    whole = hashlib.sha256()
    size = 0
    sums = _TensorSums(path) if path.suffix == ".safetensors" else None
    for piece in _pieces(path):
        whole.update(piece)
        if sums is not None:
            sums.add(piece, size)
        size += len(piece)
        advance(len(piece))
    tensors = None if sums is None else sums.found
    return FileDigest(bytes=size, sha256=whole.hexdigest(), tensors=tensors)


class _TensorSums:
    """CRC-32 of each tensor of a file whose bytes are given in order."""

    def __init__(self, path: Path) -> None:
        try:
            infos, _ = read_header(path)
        except CheckpointError:  # a damaged file has no tensors to compare
            infos = []
        self._infos = infos
        self._next = 0
        self._crc = 0
        self.found: dict[str, str] = {}

    def add(self, piece: memoryview, start: int) -> None:
        """Add the bytes of the file from `start` on."""
        stop = start + len(piece)
        while self._next < len(self._infos):
            info = self._infos[self._next]
            end = info.offset + info.nbytes
            if info.offset > stop or (info.offset == stop and info.nbytes):
                return
            part = piece[max(info.offset - start, 0) : min(end, stop) - start]
            self._crc = zlib.crc32(part, self._crc)
            if end > stop:
                return
            self.found[info.name] = f"{self._crc:08x}"
            self._next, self._crc = self._next + 1, 0


def _pieces(path: Path) -> Iterator[memoryview]:
    """Yield a file in pieces; each is overwritten by the next."""
    buffer = memoryview(bytearray(_PIECE))
    with os.fdopen(open_file(path), "rb", buffering=0) as stream:
        try:
            while got := stream.readinto(buffer):
                yield buffer[:got]
        except OSError as error:
            raise unreadable(path, error) from error


def source_of(folder: Path) -> dict[str, SourceFile]:
    """Describe a model's files without reading its weights."""
    found: dict[str, SourceFile] = {}
    config = folder / CONFIG
    if config.is_file():
        digest = file_digest(config)
        found[config.name] = SourceFile(bytes=digest.bytes, sha256=digest.sha256)
    for path in sorted(folder.glob("*.safetensors")):
        with os.fdopen(open_file(path), "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            size = os.fstat(stream.fileno()).st_size
            header = stream.read(min(length, size))
        digest_of_header = hashlib.sha256(header).hexdigest()
        found[path.name] = SourceFile(bytes=size, header_sha256=digest_of_header)
    return found


def _version() -> str:
    try:
        return version("steelyard")
    except PackageNotFoundError:  # a source tree on the path
        return "unknown"
