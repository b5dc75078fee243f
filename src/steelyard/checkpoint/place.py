"""Where a checkpoint may be written, and which folders it may replace."""

from __future__ import annotations

import os
import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from steelyard.checkpoint.model_files import (
    foreign_files,
    is_checkpoint,
    is_model_file,
    is_tokenizer_file,
)
from steelyard.checkpoint.other_files import other_files
from steelyard.checkpoint.provenance import FileDigest, file_digest, read_provenance
from steelyard.errors import CheckpointError

__all__ = ["check_apart", "check_output", "output_path"]

_RESERVED = re.compile(r"\..+\.steelyard(-done)?")  # see `steelyard.checkpoint.work_folder`


def output_path(given: str | Path) -> Path:
    """Return the path of an output folder, absolute and without links.

    An empty path and the root folder, which has no name, are refused.
    """
    if not str(given).strip():
        raise CheckpointError(
            "the output folder is an empty text, perhaps an unset variable; name a folder"
        )
    out = Path(given).resolve()
    if out == out.parent:
        raise CheckpointError(f"{out} is the root folder; choose a folder for the output")
    return out


def check_output(out: Path, overwrite: bool, keep_tokenizer: bool = False) -> None:
    """Refuse an output that cannot be written, or holds files that must not be lost.

    Only an empty folder or, with `overwrite`, a checkpoint is replaced.

    keep_tokenizer: its tokenizer will be kept, so a folder that holds nothing else may be replaced
    """
    for part in out.parts:
        if _RESERVED.fullmatch(part):
            raise CheckpointError(
                f"{part} in {out} is a name for the folders of unfinished runs; choose another "
                "folder for the output"
            )
    _check_not_around(out)
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose a folder for the output")
    if out.is_dir():
        _check_replaceable(out, overwrite, keep_tokenizer)
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{parent} is not a folder that you may write to, so {out} cannot be made in it"
        )


def _check_not_around(out: Path) -> None:
    """Refuse the current folder, the home folder and their parents."""
    for name, find in (("current", Path.cwd), ("home", Path.home)):
        with suppress(OSError, RuntimeError):  # it may not exist
            place = find().resolve()
            if out == place:
                raise CheckpointError(
                    f"{out} is the {name} folder, which is never replaced; choose a folder inside "
                    f"it, such as {out / 'model'}"
                )
            if out in place.parents:
                raise CheckpointError(
                    f"{out} contains the {name} folder, and is never replaced; choose another "
                    "folder for the output"
                )


def _check_replaceable(out: Path, overwrite: bool, keep_tokenizer: bool) -> None:
    if os.path.ismount(out):
        raise CheckpointError(
            f"{out} is a mount point, and cannot be replaced in one step; choose a folder "
            f"inside it, such as {out / 'model'}"
        )
    try:
        if not any(out.iterdir()):
            return
        foreign = [str(path) for path in islice(foreign_files(out, _carried(out)), 4)]
        found = ", ".join(foreign[:3]) + (" and more" if len(foreign) > 3 else "")
        whole = is_checkpoint(out)
        kept = keep_tokenizer and all(is_tokenizer_file(path) for path in other_files(out))
    except OSError as error:
        raise CheckpointError(
            f"{out} cannot be read ({error.strerror}), so it is not replaced; choose another folder"
        ) from error
    if foreign:
        raise CheckpointError(
            f"{out} is not empty and holds {found}, not part of a checkpoint, so it is not "
            "replaced, even with overwrite=True; choose another folder, or move that away"
        )
    if not whole and not kept:
        raise CheckpointError(
            f"{out} is not empty and has no config.json with weights, so it is not a checkpoint "
            "and is not replaced, even with overwrite=True; choose another folder"
        )
    if not overwrite and not kept:
        raise CheckpointError(
            f"{out} is not empty; choose another folder, or replace its contents with "
            "overwrite=True"
        )


def _carried(out: Path) -> set[Path]:
    """Return the files that a run copied from its source and that are unchanged."""
    try:
        provenance = read_provenance(out)
    except CheckpointError:  # then no file is known to be a copy
        return set()
    named = {} if provenance is None else provenance.files
    return {
        Path(name)
        for name, recorded in named.items()
        if not is_model_file(Path(name)) and _is_unchanged(out / name, recorded)
    }


def _is_unchanged(path: Path, recorded: FileDigest) -> bool:
    with suppress(CheckpointError):
        return path.is_file() and not path.is_symlink() and file_digest(path) == recorded
    return False


def check_apart(out: Path, source: Path) -> None:
    """Refuse an output that is, contains or is inside the source."""
    if out == source:
        raise CheckpointError(f"{out} is the source itself; choose another folder for the output")
    if out in source.parents:
        raise CheckpointError(f"{out} contains the source {source}; choose another output folder")
    if source in out.parents:
        raise CheckpointError(f"{out} is inside the source {source}; choose another output")
    for file in source.glob("*.safetensors"):  # they may be links
        if out in file.resolve().parents:
            raise CheckpointError(
                f"{file} links into {out}, which would be replaced; choose another folder for the "
                "output"
            )
