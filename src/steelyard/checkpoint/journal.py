"""The journal of an unfinished run: its progress, in one sealed JSON file.

    {"format": 5, "sha256": "...", "content": {...}}

The digest covers the content as written, so it detects any change by a disk or an editor. It is not
a signature: anyone who can write to the folder can also write a digest. The content names every
file that the run needs to resume, each with its size and checksum.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.checkpoint.shard_file import checksum
from steelyard.errors import CheckpointError

__all__ = ["check_file", "file_record", "journal_text", "read_journal"]

_FORMAT = 5

Count = Annotated[int, Field(ge=0)]
Crc = Annotated[int, Field(ge=0, lt=1 << 32)]
FileName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class FileRecord(_Strict):
    """A file next to the checkpoint, such as the hidden states for the next layer."""

    size: Count
    crc: Crc


class ShardRecord(FileRecord):
    """A complete shard; see `ShardFile.close`."""

    names: list[str]
    nbytes: Count
    header: Count
    header_crc: Crc


class HeaderEntry(_Strict):
    """A tensor in the header of a shard."""

    dtype: str
    shape: list[Count]
    data_offsets: tuple[Count, Count]


class OpenShard(_Strict):
    """A shard that is being written; see `ShardFile.state`."""

    names: list[str]
    nbytes: Count
    written: Count
    crc: Crc
    header: Count
    entries: dict[str, HeaderEntry]
    waiting: dict[str, tuple[str, list[Count], str]]


class Journal(_Strict):
    """Progress of one rank.

    identity: inputs of the run; empty where it cannot be resumed
    complete: the checkpoint is complete, and may be in place already
    folder:   inode of the checkpoint's folder, the same after it is moved
    shards:   by number
    open:     by number
    files:    by name, in the work folder
    changed:  tensors of the source that the run changed without quantizing them
    progress: one mark per rank; the engine defines their form
    """

    identity: dict[str, Any]
    complete: bool
    folder: Count
    shards: dict[Count, ShardRecord]
    open: dict[Count, OpenShard]
    files: dict[FileName, FileRecord]
    changed: list[str]
    progress: list[dict[str, Any]]


def journal_text(content: dict[str, Any]) -> str:
    """Return the text of a journal with the fields of `Journal`, sealed."""
    text = json.dumps(content)
    return f"{_opening(_digest(text))}{text}}}"


def read_journal(path: Path) -> dict[str, Any]:
    """Return the fields of a journal; refuse one that is damaged or of another version."""
    try:
        whole = path.read_text(encoding="utf-8")
        outer: Any = json.loads(whole)
    except (OSError, ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if isinstance(outer, dict) and outer.get("format") != _FORMAT and "format" in outer:
        raise CheckpointError(
            f"{path} is of another version of Steelyard, or damaged; start anew with resume=False"
        )
    if not isinstance(outer, dict) or set(outer) != {"format", "sha256", "content"}:
        raise _damaged(path, "it is not a journal")
    opening = _opening(outer["sha256"])
    content = whole.removeprefix(opening)[:-1]
    if not whole.startswith(opening) or _digest(content) != outer["sha256"]:
        raise _damaged(path, "its content does not match its checksum")
    try:
        journal = Journal.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in first["loc"])
        raise _damaged(path, f"{where}: {first['msg']}") from error
    return journal.model_dump(mode="python")


def file_record(path: Path) -> dict[str, int]:
    """Return the record of a file on disk, for `check_file`."""
    size = path.stat().st_size
    return {"size": size, "crc": checksum(path, 0, size)}


def check_file(path: Path, record: dict[str, int]) -> None:
    """Refuse a file that does not match its record."""
    if not path.is_file():
        raise CheckpointError(f"{path} is missing; start anew with resume=False")
    if path.is_symlink() or file_record(path) != record:
        raise CheckpointError(
            f"{path} was changed or cut off after it was written; start anew with resume=False"
        )


def _opening(digest: str) -> str:
    return f'{{"format": {_FORMAT}, "sha256": "{digest}", "content": '


def _digest(content: str) -> str:
    return hashlib.sha256(content.encode()).hexdigest()


def _damaged(path: Path, reason: str) -> CheckpointError:
    return CheckpointError(f"{path} was damaged ({reason}); start anew with resume=False")
