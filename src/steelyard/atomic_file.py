"""Writes single files atomically, and never over a file of another kind.

The content goes to a hidden file in the same folder, is synced to disk, and replaces the old file
by a rename. The writer holds a lock on the hidden file, so the next run can recognize and remove
the partial file of a killed one. Existing files of another kind belong to the user or to a model.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from steelyard.errors import OutputError, SteelyardError
from steelyard.file_lock import lock_file

__all__ = ["FileKind", "safetensors_metadata", "sync", "write_atomic"]


@dataclass(frozen=True)
class FileKind:
    """A kind of file that Steelyard writes.

    what:   its name in messages, such as "statistics"
    is_own: whether an existing regular file is of this kind; may raise OSError
    error:  raised for a path that cannot be used
    """

    what: str
    is_own: Callable[[Path], bool]
    error: type[SteelyardError]

    def check_place(self, path: str | Path) -> None:
        """Refuse a path that cannot or must not be written, before any work is done."""
        if not str(path).strip():
            raise self.error(f"the path of the {self.what} is empty, perhaps an unset variable")
        path = Path(path)
        if not path.parent.is_dir():
            raise self.error(
                f"{path.parent} is not a folder, so {path.name} cannot be saved in it; create it"
            )
        try:
            mode = path.lstat().st_mode
        except FileNotFoundError:
            mode = 0
        except OSError as error:
            raise self.error(
                f"{path} cannot be used for the {self.what}: {error.strerror}; choose another name"
            ) from error
        if mode:
            self._check_replaceable(path, mode)
        elif path.suffix == ".safetensors" and (path.parent / "config.json").exists():
            raise self.error(
                f"{path.parent} holds a model, and a server would load {path.name} with its "
                f"weights; save the {self.what} in another folder"
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise self.error(
                f"{path.parent} is not a folder that you may write to, so {path.name} cannot be "
                "saved in it; choose another"
            )
        _remove_leftovers(path)

    def _check_replaceable(self, path: Path, mode: int) -> None:
        if stat.S_ISDIR(mode):
            raise self.error(f"{path} is a folder; the {self.what} are saved in one file")
        if stat.S_ISLNK(mode):
            raise self.error(
                f"{path} is a link, which is not followed; give the file that it leads to"
            )
        if not stat.S_ISREG(mode):
            raise self.error(f"{path} is a pipe, a socket or a device; choose a file")
        try:
            own = path.stat().st_size == 0 or self.is_own(path)
        except OSError:
            own = False
        if not own:
            raise self.error(
                f"{path} exists and holds no {self.what} of Steelyard, so it is not replaced; "
                "choose another name, or remove it"
            )

    def write(self, path: str | Path, content: bytes) -> None:
        """Check the path again and write the file."""
        self.check_place(path)
        try:
            write_atomic(path, content)
        except OSError as error:
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "free some space" if full else "choose another path, or fix this one"
            raise OutputError(
                f"{path} cannot be written: {error.strerror or error}; {remedy}, and run the same "
                "command again"
            ) from error


def write_atomic(path: str | Path, content: bytes | str) -> None:
    """Write and sync a file atomically: after an OSError, it is unchanged."""
    path = Path(path)
    data = memoryview(content.encode("utf-8") if isinstance(content, str) else content)
    _remove_leftovers(path)
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(partial, flags, 0o666)
    try:
        with suppress(OSError):  # a file system without locks
            lock_file(handle, holder=None)
        done = 0
        while done < len(data):
            done += os.write(handle, data[done:])
        os.fsync(handle)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    finally:
        os.close(handle)
    sync(path.parent)


def sync(path: Path) -> None:
    """Sync a file, or the entries of a folder, to disk."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove_leftovers(path: Path) -> None:
    """Remove the partial files of killed runs."""
    for old in path.parent.glob(f".{_literal(path.name)}.*.partial"):
        number = old.name.removeprefix(f".{path.name}.").removesuffix(".partial")
        if not number.isdigit():
            continue
        if int(number) == os.getpid():  # from a dead process with the same id
            old.unlink(missing_ok=True)
            continue
        with suppress(OSError):
            handle = os.open(old, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                lock_file(handle, holder=int(number))  # else someone writes it
                old.unlink()
            finally:
                os.close(handle)


def _literal(name: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)


def safetensors_metadata(path: Path) -> dict[str, str] | None:
    """Return the metadata of a safetensors file; None for any other file."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError:
        return None
