"""Files of a checkpoint that are not weights, and are copied to the output.

A link among them could copy any file to the output: its target must be in the folder, or in the
hub's cache.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path

from steelyard.checkpoint.untrusted_files import mode_of, unreadable
from steelyard.errors import CheckpointError

__all__ = ["can_be_copied", "check_kinds", "copy_files", "entries", "other_files"]

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")
_NOT_MODEL = {".git", ".cache"}  # of git and the hub's downloader
_SHARED_BLOB = re.compile(r"[0-9a-f]{2}/[0-9a-f]{64}")  # in the store that cached models share


def other_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are not weights, relative to it.

    Does not follow links to folders: files inside the checkpoint are listed where they are.
    """
    root = folder.resolve()
    found, pending = [], [folder]
    while pending:
        for path in entries(pending.pop()):
            if path.name in _NOT_MODEL:
                continue
            if stat.S_ISDIR(mode_of(path)):
                pending.append(path)
            elif not _is_weights(path) and can_be_copied(path, root):
                found.append(path.relative_to(folder))
    return sorted(found)


def copy_files(
    folder: Path, files: Iterable[Path], target: Path, without: Iterable[str] = ()
) -> list[Path]:
    """Copy files of a folder that `target` does not hold yet; return the copied ones.

    files, without: relative to the folder
    """
    copied = []
    for relative in files:
        place = target / relative
        if str(relative) in without or place.exists():
            continue
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / relative, place)
        except OSError as error:
            raise CheckpointError(
                f"{folder / relative} cannot be copied to {place}: {error.strerror}; the same "
                "command resumes from its last mark"
            ) from error
        copied.append(relative)
    return copied


def check_kinds(folder: Path) -> None:
    """Refuse pipes and devices in a folder that a library will read; a missing folder passes."""
    for path in entries(folder) if folder.is_dir() else ():
        if path.exists() and not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path} is a pipe, a socket or a device, which no model needs; remove it"
            )


def _is_weights(path: Path) -> bool:
    name = path.name.removesuffix(".index.json")
    return name.endswith(_WEIGHTS)


def entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError as error:
        raise unreadable(folder, error) from error


def can_be_copied(path: Path, root: Path) -> bool:
    """Whether a path is a file that can be copied; raise if copying is unsafe or impossible.

    root: the folder of the checkpoint, resolved
    """
    try:
        target = path.resolve(strict=True)
        mode = target.stat().st_mode
    except (OSError, RuntimeError) as error:
        raise unreadable(path, error) from error
    if path.is_symlink() and not (target.is_relative_to(root) or _is_cached(target, root)):
        raise CheckpointError(
            f"{path} is a link to {target}, outside the checkpoint, and would be copied; put the "
            "file in the link's place if it belongs to the model, else remove the link"
        )
    if stat.S_ISDIR(mode):
        return False
    if not stat.S_ISREG(mode):  # skipping it silently would hide that something is wrong
        raise CheckpointError(
            f"{path} is a pipe, a socket or a device, which no model needs; remove it"
        )
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read; change its permissions, or remove it")
    return True


def _is_cached(target: Path, root: Path) -> bool:
    """Whether it is a blob of the cached model that `root` is a snapshot of.

    The hub's cache has models--x--y/snapshots/<revision>/<file>, a link into models--x--y/blobs,
    where newer versions keep a link to blobs/<2 digits>/<hash> next to models--x--y. If `blobs` is
    itself a link, it may come from the checkpoint and point anywhere: that does not count.
    """
    for snapshots in (folder for folder in root.parents if folder.name == "snapshots"):
        own, shared = snapshots.parent / "blobs", snapshots.parent.parent / "blobs"
        if target.parent == own:
            return True
        if shared in target.parents and _SHARED_BLOB.fullmatch(str(target.relative_to(shared))):
            return True
    return False
