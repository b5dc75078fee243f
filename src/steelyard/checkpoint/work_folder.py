"""The hidden folder next to the output in which a checkpoint is written until it is complete.

    .out.steelyard/lock           held while a run works here; a second run is refused
    .out.steelyard/journal.json   progress; replaced atomically at each mark
    .out.steelyard/journal-1.json the same of rank 1, where several ranks write
    .out.steelyard/hidden-0-7.safetensors and others that the journal names
    .out.steelyard/checkpoint/    the output so far
    .out.steelyard/old/           the previous output, until the last rename
    .out.steelyard-done           the journal of a run whose output is in place, until the folder
                                  above is gone

Only the user can write to the folder, and it holds no links. Anything else under its name is
refused, never followed or removed.

The folder stays if the process dies. The same command resumes from the journal, if source, recipe
and versions match it.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.atomic_file import sync, write_atomic
from steelyard.checkpoint.exchange import exchange
from steelyard.checkpoint.journal import journal_text, read_journal
from steelyard.errors import CheckpointError
from steelyard.file_lock import lock_file

__all__ = ["WorkFolder"]


class WorkFolder:
    """Locked from `open` to `close`."""

    def __init__(self, output: Path) -> None:
        self.output = output
        self.path = output.with_name(f".{output.name}.steelyard")
        self.done = output.with_name(f".{output.name}.steelyard-done")
        self.checkpoint = self.path / "checkpoint"
        self.old = self.path / "old"
        self._lock = -1
        self._made: list[Path] = []  # parents that did not exist, the innermost first

    @property
    def journal(self) -> Path:
        return self.path / "journal.json"

    # -- lifecycle --------------------------------------------------------------------------

    def open(self) -> None:
        """Make the folder and lock it."""
        parents = [self.path.parent, *self.path.parent.parents]
        self._made = [parent for parent in parents if not parent.exists()]
        try:
            while not self._locked():
                pass
        except OSError as error:
            self._remove_parents()
            raise CheckpointError(f"cannot write next to {self.output}: {error}") from error

    def _locked(self) -> bool:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)  # or others could put links into it
        place = self.path / "lock"
        try:
            self.check_own()
            handle = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # a run that just ended removed its folder
            return False
        try:
            holder = self._holder(handle)
            lock_file(handle, holder)
        except BlockingIOError:
            holder = self._holder(handle)  # it may not have written its number yet
            os.close(handle)
            raise CheckpointError(
                f"another run (process {holder or 'unknown'}) is writing to {self.output}; wait "
                "for it, or choose another output"
            ) from None
        except BaseException:
            os.close(handle)
            raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(handle), place.lstat()):
                os.ftruncate(handle, 0)
                os.pwrite(handle, str(os.getpid()).encode(), 0)
                self._lock = handle
                return True
        os.close(handle)
        return False

    def check_own(self) -> None:
        """Refuse a folder by our name that no run of this user made, or that holds links."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise self._not_ours("is a link or a file")
        if status.st_uid != os.geteuid():
            raise self._not_ours("belongs to another user")
        found = list(self.path.iterdir())
        names = [path.name for path in found]
        for path in found:
            if path.is_symlink():
                raise self._not_ours(f"holds the link {path.name}")
        if names and "lock" not in names and "journal.json" not in names:
            raise self._not_ours(f"holds {sorted(names)[0]} and no lock")

    def _holder(self, handle: int) -> int | None:
        """Return the process that a lock names; refuse any other file."""
        status = os.fstat(handle)
        known = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
        content = os.pread(handle, 33, 0) if known else b""
        if not known or status.st_nlink > 1 or not re.fullmatch(rb"\d{0,32}", content):
            raise self._not_ours("holds an invalid lock")
        return int(content) if content else None

    def _not_ours(self, why: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path} {why}, so no run of yours made it, and nothing is written there; "
            "move it away, or choose another output"
        )

    def close(self, keep: bool) -> None:
        """Unlock; without `keep`, remove the folder first."""
        if self._lock < 0:
            return
        try:
            if not keep:
                self._put_back()
                self._remove()
        finally:
            os.close(self._lock)
            self._lock = -1
        if not keep:
            self._remove_parents()

    def _remove(self) -> None:
        """Remove the folder, the journal last, so that a complete output is recognized until then.

        The journal moves next to the folder, which must be empty to be removed.
        """
        if self.checkpoint.exists() or not self.output.exists():  # the output is not in place
            self.journal.unlink(missing_ok=True)
            self._remove_done()
        elif self.journal.exists() and (self._owns_done() or not os.path.lexists(self.done)):
            self.journal.rename(self.done)
        lock = self.path / "lock"
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path != lock:
                path.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
        with suppress(OSError):  # something could not be removed
            self.path.rmdir()
        self._remove_done()

    def _owns_done(self) -> bool:
        """Whether the journal of a finished run is next to the output."""
        with suppress(OSError):
            handle = os.open(self.done, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                status = os.fstat(handle)
                known = stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid()
                return known and os.pread(handle, 9, 0) == b'{"format"'
            finally:
                os.close(handle)
        return False

    def _remove_done(self) -> None:
        if self._owns_done():
            self.done.unlink(missing_ok=True)

    def _remove_parents(self) -> None:
        for parent in self._made:
            with suppress(OSError):  # another program may have added files
                parent.rmdir()

    def remove_leftover(self) -> None:
        """Remove a folder that no run can resume from; refuse a locked one."""
        if os.path.lexists(self.path) or self._owns_done():
            self.open()
            self.close(keep=False)

    # -- the journal --------------------------------------------------------------------------

    def read(self) -> dict[str, Any] | None:
        """Return the journal of an unfinished run, or of one that just finished."""
        self.check_own()
        if self.journal.exists():
            return read_journal(self.journal)
        return read_journal(self.done) if self._owns_done() else None

    def read_all(self) -> list[dict[str, Any]]:
        """Return the journals of all ranks of a run that can be resumed."""
        journals = map(read_journal, sorted(self.path.glob("journal*.json")))
        return [journal for journal in journals if journal["identity"]]

    def record(self, content: dict[str, Any], rank: int = 0) -> None:
        """Replace the journal of a rank; the bytes that it lists must be on disk already."""
        path = self.path / f"journal-{rank}.json" if rank else self.journal
        try:
            sync(self.checkpoint)
            write_atomic(path, journal_text(content))
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be written: {error.strerror}; make room or choose another "
                "disk. The same command resumes from its last mark"
            ) from error

    def has_ranks(self) -> bool:
        """Whether a rank other than the first has a journal."""
        return any(self.path.glob("journal-*.json"))

    def forget_ranks(self) -> None:
        for path in self.path.glob("journal-*.json"):
            path.unlink()

    def clear(self) -> None:
        """Discard an earlier run; put the old output back if nothing replaced it."""
        self._put_back()
        self.journal.unlink(missing_ok=True)
        self._remove_done()
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != "lock":
                path.unlink()

    def _put_back(self) -> None:
        if self.old.exists() and not self.output.exists():
            self.old.rename(self.output)

    # -- the end ------------------------------------------------------------------------------

    def move_into_place(self) -> None:
        """Move the checkpoint to the output; the output is always either the old or the new one.

        Where two folders cannot be exchanged, there is a moment without either: if the run is
        killed then, the next one restores the old output.
        """
        if not self.output.exists():
            self.checkpoint.rename(self.output)
        elif exchange(self.checkpoint, self.output):
            self.checkpoint.rename(self.old)
        else:
            shutil.rmtree(self.old, ignore_errors=True)
            self.output.rename(self.old)
            try:
                self.checkpoint.rename(self.output)
            except BaseException:
                self.old.rename(self.output)
                raise
        sync(self.output.parent)
