"""Checks that the files of a checkpoint are those that the run wrote."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from steelyard.checkpoint.model_files import is_model_file
from steelyard.checkpoint.provenance import (
    MUTABLE,
    PROVENANCE,
    SIGNATURE,
    FileDigest,
    Provenance,
    file_digest,
    hashing_threads,
)
from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = ["DigestsFound", "Watch", "check_digests", "unwatched"]

Advance = Callable[[int], Any]
Watch = Callable[..., AbstractContextManager[Advance]]
"""Shows progress: `with watch(label, total, unit="bytes") as advance`, as `engine.progress`."""

_NAMED = 3  # tensors of a file that a message names


def unwatched(label: str, total: int, unit: str) -> AbstractContextManager[Advance]:
    return nullcontext(lambda _: None)


@dataclass
class DigestsFound:
    """Result of comparing digests; `files` and `bytes` count the data read.

    added: files of a model that the run did not write, such as a chat template
    """

    files: int = 0
    bytes: int = 0
    problems: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def check_digests(folder: Path, provenance: Provenance, watch: Watch = unwatched) -> DigestsFound:
    """Hash every file that the run wrote and compare; several files at once."""
    found = DigestsFound(files=len(provenance.files))
    known = {PROVENANCE, SIGNATURE, *MUTABLE, *provenance.files}
    present = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    for name in sorted(present - known):
        if name.endswith(".safetensors"):
            found.problems.append(
                f"{name} is not among the files that the run wrote ({PROVENANCE}); a server may "
                "load it, so remove it"
            )
        elif is_model_file(Path(name)) and not name.startswith("."):
            found.added.append(name)
    found.bytes = sum(_size(folder, name) for name in provenance.files)
    with (
        watch("comparing digests", found.bytes, unit="bytes") as advance,
        hashing_threads() as pool,
    ):
        compare = partial(_compare, folder, advance)
        for problem in pool.map(compare, provenance.files, provenance.files.values()):
            found.problems += [] if problem is None else [problem]
    return found


def _compare(folder: Path, advance: Advance, name: str, expected: FileDigest) -> str | None:
    if not _is_inside(name):
        return f"{PROVENANCE} lists {show(name)}, which is not a file of this folder"
    if not (folder / name).is_file():
        return f"{name} is missing; the run wrote it"
    try:
        now = file_digest(folder / name, advance)
    except CheckpointError as error:
        return str(error)
    if now.sha256 == expected.sha256:
        return None
    return f"{name} was changed after the run: {_difference(now, expected)}"


def _difference(now: FileDigest, expected: FileDigest) -> str:
    """Return how two versions of a file differ: in tensors, else in size or digest."""
    before, after = expected.tensors or {}, now.tensors or {}
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if after and changed:
        listed = ", ".join(changed[:_NAMED])
        more = f" and {len(changed) - _NAMED:,} more" if len(changed) > _NAMED else ""
        return f"{listed}{more} {'differs' if len(changed) == 1 else 'differ'}"
    if now.bytes != expected.bytes:
        return f"it has {now.bytes:,} bytes, not {expected.bytes:,}"
    return f"its SHA-256 is {now.sha256[:12]}..., not {expected.sha256[:12]}..."


def _is_inside(name: str) -> bool:
    place = PurePosixPath(name)
    return name.isprintable() and not place.is_absolute() and ".." not in place.parts


def _size(folder: Path, name: str) -> int:
    path = folder / name
    return path.stat().st_size if _is_inside(name) and path.is_file() else 0
