"""`provenance.json`: the source of a checkpoint, and a digest of every file in it.

It is written last, as an in-toto statement (see `statement`) with a part of our own. It holds no
time and no path, so the same run writes the same bytes. Files that may be edited later have no
digest. `changed` lists the tensors that the run changed before or without quantizing them; it is
absent if there are none. Our part of the predicate:

    {"schema_version": 2,
     "source": {"config.json": {"bytes": 654, "sha256": "..."},
                "model.safetensors": {"bytes": 269060552, "header_sha256": "...",
                                      "sampled_sha256": "..."}},
     "run": {"versions": {...}, "recipe": "...", "calibration": {...}, "inputs": {...},
             "options": {...}, "figures": {...}},
     "files": {"config.json": {"bytes": 1820},
               "model.safetensors": {"bytes": 95123456,
                                     "tensors": {"model.norm.weight": "1f0c93ab"}}},
     "mutable": ["README.md", "report.html", "report.json"],
     "changed": ["model.norm.weight"]}

`tensors` are CRC-32: they tell which tensor changed in a file whose SHA-256 no longer matches.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.atomic_file import write_atomic
from steelyard.checkpoint.config_file import CONFIG
from steelyard.checkpoint.header import read_header
from steelyard.checkpoint.statement import content_of, statement_of
from steelyard.checkpoint.untrusted_files import mode_of, open_file, read_json, unreadable
from steelyard.errors import CheckpointError
from steelyard.kernels.checksum import crc32

__all__ = [
    "MUTABLE",
    "PROVENANCE",
    "SIGNATURE",
    "CalibrationRecord",
    "FileDigest",
    "Provenance",
    "RunRecord",
    "file_digest",
    "hashing_threads",
    "read_provenance",
    "sampled_digest",
    "source_of",
    "write_provenance",
]

PROVENANCE = "provenance.json"
SIGNATURE = "model.sig"
SCHEMA_VERSION = 2
MUTABLE = (".gitattributes", "README.md", "report.html", "report.json")
_PIECE = 1 << 22
_WHOLE = 16 << 20  # bytes; sources up to this size are digested as a whole
_BLOCKS, _BLOCK = 256, 16 << 10  # larger ones: number of sampled blocks, bytes of each
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
    """A file of the source: config.json by its content, weights by size, header and samples.

    sampled_sha256: see `sampled_digest`; a source is not read a second time
    """

    bytes: int
    sha256: str | None = None
    header_sha256: str | None = None
    sampled_sha256: str | None = None


class CalibrationRecord(_Strict):
    """The calibration data of a run; the digest covers names, types, shapes and values."""

    sha256: str
    batches: int
    tokens: int


class RunRecord(_Strict):
    """What a run depended on, and what it measured.

    recipe:  SHA-256 of its text, which the checkpoint holds as recipe.yaml
    inputs:  digests of statistics, importance files and plug-ins, by name
    options: those that the result depends on, in JSON's types
    """

    versions: dict[str, str]
    recipe: str
    calibration: CalibrationRecord | None = None
    inputs: dict[str, str] = Field(default_factory=dict)
    options: dict[str, Any] = Field(default_factory=dict)
    figures: dict[str, float] = Field(default_factory=dict)


class Provenance(_Strict):
    """The content of `provenance.json`.

    run:     None where no run of a recipe wrote the checkpoint
    source:  None where a loaded model was quantized
    mutable: files that may change later, such as the report, which `evaluate` updates
    changed: tensors that differ from the source's because a step of the recipe changed them
    """

    schema_version: int = SCHEMA_VERSION
    run: RunRecord | None = None
    source: dict[str, SourceFile] | None = None
    files: dict[str, FileDigest]
    mutable: list[str] = Field(default_factory=lambda: list(MUTABLE))
    changed: list[str] | None = None

    @classmethod
    def of(
        cls,
        folder: Path,
        source: Path | None,
        changed: Iterable[str] = (),
        run: RunRecord | None = None,
    ) -> Provenance:
        """Return the provenance of a complete checkpoint; large files are hashed in parallel."""
        names = sorted(
            str(path.relative_to(folder).as_posix())
            for path in folder.rglob("*")
            if path.is_file() and path.name != PROVENANCE
        )
        names = [name for name in names if name not in (*MUTABLE, SIGNATURE)]
        with hashing_threads() as pool:
            digests = pool.map(file_digest, [folder / name for name in names])
            files = dict(zip(names, digests, strict=True))
        origin = None if source is None else source_of(source)
        return cls(run=run, source=origin, files=files, changed=sorted(changed) or None)

    def to_json(self) -> str:
        content = self.model_dump(mode="json", exclude_none=True)
        digests = {name: file.pop("sha256") for name, file in content["files"].items()}
        ignored = (*self.mutable, PROVENANCE, SIGNATURE)
        return json.dumps(statement_of(digests, ignored, content), indent=1) + "\n"


def write_provenance(
    folder: Path,
    source: Path | None,
    changed: Iterable[str] = (),
    run: RunRecord | None = None,
) -> None:
    """Write `provenance.json` into a complete checkpoint, and wait until it is on the disk."""
    write_atomic(folder / PROVENANCE, Provenance.of(folder, source, changed, run).to_json())


def read_provenance(folder: Path) -> Provenance | None:
    """Return the provenance of a checkpoint; None where it has none."""
    path = folder / PROVENANCE
    if not mode_of(path):
        return None
    try:
        digests, content = content_of(read_json(path))
        found = content.get("schema_version")
        if found != SCHEMA_VERSION:
            raise ValueError(f"its schema_version is {found!r}, known is {SCHEMA_VERSION}")
        files = content.get("files")
        if not isinstance(files, dict) or files.keys() != digests.keys():
            raise ValueError("its files are not those of its resources")
        files = {
            name: {**file, "sha256": digests[name]} if isinstance(file, dict) else file
            for name, file in files.items()
        }
        return Provenance.model_validate({**content, "files": files})
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
            self._crc = crc32(part, self._crc)
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
        found[path.name] = SourceFile(
            bytes=size, header_sha256=digest_of_header, sampled_sha256=sampled_digest(path)
        )
    return found


def sampled_digest(path: Path) -> str:
    """Return a digest of a file: of all of it up to 16 MiB, else of 256 evenly spaced blocks.

    Another model of the same size differs in every block. A change of a few bytes may fall between
    them; only the file's modification time shows that.
    """
    with os.fdopen(open_file(path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest = hashlib.sha256(str(size).encode())
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for index in range(_BLOCKS):  # the first holds the header, the last is the end
                file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()
