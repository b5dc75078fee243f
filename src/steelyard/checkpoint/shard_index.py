"""Finds the files that make up a checkpoint: those of the index, else one file, else all."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath

from steelyard.checkpoint.header import check_name
from steelyard.checkpoint.other_files import entries
from steelyard.checkpoint.untrusted_files import mode_of, read_json
from steelyard.errors import CheckpointError
from steelyard.foreign import show

__all__ = ["INDEX", "SINGLE", "check_index", "find_shards"]

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"(.+)-(\d{1,9})-of-(\d{1,9})\.safetensors")


def find_shards(folder: Path) -> tuple[dict[str, str] | None, list[Path], list[Path]]:
    """Return the index, if there is one, the files to read, and all other safetensors files.

    index: name of a tensor -> name of its file
    """
    present = [path for path in entries(folder) if path.name.endswith(".safetensors")]
    index = _read_index(folder)
    if index is not None:
        files = sorted({folder / file for file in index.values()})
        _check_files(folder, files, present)
    elif folder / SINGLE in present:
        files = [folder / SINGLE]
    else:
        files = present
        _check_numbers(folder, present)
    if not files:
        raise CheckpointError(_no_weights(folder))
    return index, files, [file for file in present if file not in files]


def check_index(folder: Path, index: Mapping[str, str], found: Mapping[str, Path]) -> None:
    """Refuse an index that contradicts the files.

    found: name of a tensor -> the file that holds it
    """
    for name, file in index.items():
        if name not in found:
            raise CheckpointError(
                f"{INDEX} places {name} in {folder / file}, which does not hold it; "
                "download both again, or save the model again"
            )
        if found[name] != folder / file:
            raise CheckpointError(
                f"{INDEX} places {name} in {folder / file}, but it is in {found[name]}; download "
                "both again, or save the model again"
            )
    for name, place in found.items():
        if name not in index:
            raise CheckpointError(
                f"{place} holds {name}, which {INDEX} does not list; download both again, or save "
                "the model again"
            )


def _check_files(folder: Path, files: list[Path], present: list[Path]) -> None:
    for file in files:
        if not mode_of(file):
            raise CheckpointError(
                f"{folder / INDEX} names {file.name}, which is not there; the download is "
                "incomplete, run it again"
            )
    single = folder / SINGLE
    if single in present and single not in files:
        raise CheckpointError(
            f"{folder} has {SINGLE} and an index that does not name it; remove whichever of the "
            "two is out of date"
        )


def _check_numbers(folder: Path, present: list[Path]) -> None:
    """Refuse shards whose names imply missing ones; without an index nothing else tells."""
    numbers: dict[tuple[str, int], set[int]] = {}
    for path in present:
        if match := _NUMBERED.fullmatch(path.name):
            numbers.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (name, count), found in numbers.items():
        if len(found) < count:
            first = next(i for i in range(1, count + 1) if i not in found)
            raise CheckpointError(
                f"{folder} holds {len(found)} of {count} files {name}-*, without "
                f"{name}-{first:05d}-of-{count:05d}.safetensors and {INDEX}; the download is "
                "incomplete, run it again"
            )


def _read_index(folder: Path) -> dict[str, str] | None:
    path = folder / INDEX
    if not mode_of(path):
        return None
    try:
        index = read_json(path)
        entries = index.get("weight_map") if isinstance(index, dict) else index
        if not isinstance(entries, dict) or not entries:
            raise ValueError(f"its weight_map is {show(entries)}")
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"{path} is not an index of tensors to files ({error}); download it again"
        ) from error
    checked = set()
    for name, file in entries.items():
        check_name(path, name)
        if not isinstance(file, str) or file not in checked:
            _check_place(path, name, file)
            checked.add(file)
    return entries


def _check_place(index: Path, name: str, file: object) -> None:
    if not isinstance(file, str) or not file.isprintable() or len(file.encode()) > 255:
        raise CheckpointError(
            f"{index} places {name} in {show(file)}, which is not the name of a file; download it "
            "again"
        )
    posix, windows = PurePosixPath(file), PureWindowsPath(file)
    leaves = ".." in (*posix.parts, *windows.parts)
    if leaves or posix.is_absolute() or windows.is_absolute() or windows.drive:
        raise CheckpointError(
            f"{index} places {name} in {file}, outside the folder; do not use this checkpoint "
            "unless you know who made it"
        )
    if posix.suffix != ".safetensors":
        raise CheckpointError(
            f"{index} places {name} in {show(file)}, which is not a *.safetensors; convert the "
            "model, or download the index again"
        )


def _no_weights(folder: Path) -> str:
    pickled = [path.name for path in entries(folder) if path.name.endswith(".bin")]
    if not pickled:
        return f"{folder} holds no *.safetensors; is this the folder of a model?"
    return (
        f"{folder} holds {pickled[0]} but no *.safetensors; convert it: load it with "
        "AutoModelForCausalLM.from_pretrained(...) and save it with "
        "save_pretrained(..., safe_serialization=True)"
    )
