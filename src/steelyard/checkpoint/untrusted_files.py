"""Reads untrusted files: opens only regular files, and reads only up to a size.

A checkpoint comes from a stranger, so everything in it is checked before it is used: the kind of a
file, its size, and its text.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections import Counter
from pathlib import Path
from typing import Any

from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = ["MAX_JSON", "mode_of", "open_file", "parse_json", "read_json", "unreadable"]

MAX_JSON = 100_000_000  # bytes; the limit that safetensors has for a header


def unreadable(path: Path, error: Exception) -> CheckpointError:
    """Return the error for a file that the system cannot read."""
    number = getattr(error, "errno", None)
    reason = getattr(error, "strerror", None) or str(error)
    if number == errno.ENOENT and path.is_symlink():
        return CheckpointError(
            f"{path} is a link to {path.readlink()}, which is not there; the download is "
            "incomplete, run it again, or put the file in the link's place"
        )
    if number == errno.ENOENT:
        return CheckpointError(f"{path} is not there; the download is incomplete, run it again")
    if number == errno.ELOOP or isinstance(error, RuntimeError):  # the latter from Path.resolve
        return CheckpointError(
            f"{path} is a link that leads back to itself; download the checkpoint again"
        )
    if number in (errno.EACCES, errno.EPERM):
        return CheckpointError(f"{path} cannot be read ({reason}); change its permissions")
    return CheckpointError(
        f"{path} cannot be read ({reason}); check the disk that it is on, or download it again"
    )


def mode_of(path: Path) -> int:
    """Return the kind of a path, links not followed; 0 if there is none."""
    try:
        return path.lstat().st_mode
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise unreadable(path, error) from error


def open_file(path: Path) -> int:
    """Return a descriptor of a regular file.

    The kind is checked first: opening a device can have an effect, and reading one may never end.
    If it changes in between, O_NONBLOCK keeps a pipe from waiting for its other side.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise CheckpointError(
                f"{path} is not a file but a folder, a pipe or a device; download the checkpoint "
                "again"
            )
        return os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except CheckpointError:
        raise
    except OSError as error:
        raise unreadable(path, error) from error


def read_json(path: Path, unique: bool = True) -> Any:
    """Return the content of a JSON file; ValueError if it is not JSON.

    unique: refuse an object with two equal keys
    """
    with os.fdopen(open_file(path), "rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        if size > MAX_JSON:
            raise ValueError(f"it has {size:,} bytes, more than {MAX_JSON:,}")
        try:
            raw = stream.read(MAX_JSON)
        except OSError as error:
            raise unreadable(path, error) from error
    return parse_json(raw, unique)


def parse_json(raw: bytes, unique: bool = True) -> Any:
    """Parse JSON; ValueError if it is invalid.

    A key that comes twice is refused too, although safetensors uses the last one: readers differ in
    which of the two counts.
    """
    try:
        return json.loads(
            raw.decode("utf-8"), parse_int=_integer, object_pairs_hook=_object if unique else None
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"it has the key {show(twice)} twice")
    return found


def _integer(digits: str) -> int | float:
    """Parse numbers beyond 64 bits, and -0, as floats like safetensors; no field allows floats."""
    return int(digits) if len(digits) <= 20 and digits != "-0" else float(digits)
