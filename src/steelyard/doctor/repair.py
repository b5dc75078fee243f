"""Writes a copy of a checkpoint whose configuration and index fit its tensors.

No tensor is changed: shards are linked, or copied where they cannot be. Only what the tensors imply
beyond doubt is corrected; the rest remains a finding.
"""

from __future__ import annotations

import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

from steelyard.checkpoint.against_source import same_config
from steelyard.checkpoint.config_file import CONFIG, read_config, write_config
from steelyard.checkpoint.header import read_header
from steelyard.checkpoint.other_files import copy_files, entries, other_files
from steelyard.checkpoint.provenance import PROVENANCE, SIGNATURE
from steelyard.checkpoint.shard_index import INDEX, SINGLE
from steelyard.checkpoint.shards import TensorInfo
from steelyard.checkpoint.untrusted_files import read_json
from steelyard.checkpoint.written import WrittenCheckpoint
from steelyard.doctor.config_repair import repaired_fields, repaired_groups
from steelyard.errors import CheckpointError, OutputError

__all__ = ["repair_folder"]

_DROPPED = (PROVENANCE, SIGNATURE)


def repair_folder(folder: Path, output: Path, base: Path | None = None) -> list[str]:
    """Write a repaired copy; return what was changed, one line each.

    base: the original model, whose settings replace those that differ
    """
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise OutputError(f"{output} exists and is not empty; name a new folder")
    holders, changes = _holders(folder)
    config = read_config(folder)
    if "quantization_config" not in config:
        raise CheckpointError(
            f"{folder / CONFIG} has no quantization_config; there is nothing to repair, quantize "
            "the model again"
        )
    if base is not None:
        changes += _adopt(config, read_config(base))
    config["quantization_config"], fixed = repaired_fields(config["quantization_config"])
    changes += fixed
    try:
        _copy(folder, output, holders)
        write_config(output, config)
        written = WrittenCheckpoint(output, None)
        with written.shards:
            config["quantization_config"], fixed = repaired_groups(written)
        write_config(output, config)
    except BaseException:
        shutil.rmtree(output, ignore_errors=True)
        raise
    changes += fixed
    return changes + [
        f"{name} is left out: it describes the files as they were"
        for name in _DROPPED
        if (folder / name).is_file()
    ]


def _copy(folder: Path, output: Path, holders: dict[str, TensorInfo]) -> None:
    """Fill the new folder with everything but config.json."""
    output.mkdir(parents=True, exist_ok=True)
    files = sorted({info.file for info in holders.values()})
    for file in files:
        _link(file, output / file.name)
    copy_files(folder, other_files(folder), output, without=(CONFIG, INDEX, *_DROPPED))
    if [file.name for file in files] != [SINGLE]:
        _write_index(output, holders)


def _link(source: Path, target: Path) -> None:
    with suppress(OSError):  # another file system
        os.link(source.resolve(), target)
        return
    shutil.copyfile(source, target)


def _adopt(config: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Copy the settings that differ from the base model's; those that only one has are kept."""
    differing = list(same_config(config, settings, complete=False))
    for key in settings.keys() & config.keys():
        if any(True for _ in same_config({key: config[key]}, {key: settings[key]}, False)):
            config[key] = settings[key]
    return [f"{text}; now the base model's" for text in differing]


# -- the index -------------------------------------------------------------------------------------


def _holders(folder: Path) -> tuple[dict[str, TensorInfo], list[str]]:
    """Return each tensor with the file that holds it, and how the index differs."""
    files = [path for path in entries(folder) if path.name.endswith(".safetensors")]
    index = _index_of(folder)
    if index is None and folder / SINGLE in files:
        files = [folder / SINGLE]
    found: dict[str, TensorInfo] = {}
    for file in files:
        for info in read_header(file)[0]:
            other = found.get(info.name)
            if other is None or (index or {}).get(info.name) == file.name:
                found[info.name] = info
            elif (index or {}).get(info.name) != other.file.name:
                raise CheckpointError(
                    f"{info.name} is both in {other.file.name} and in {file.name}, and no index "
                    "says which belongs to the model; remove one of the files"
                )
    if not found:
        raise CheckpointError(f"{folder} holds no *.safetensors; is this the folder of a model?")
    changes = []
    if index is not None:
        wrong = [n for n in {**index, **found} if _place(found, n) != index.get(n)]
        if wrong:
            changes.append(f"{INDEX}: {len(wrong):,} entries corrected, such as {wrong[0]}")
    elif (folder / INDEX).exists():
        changes.append(f"{INDEX}: written anew, it could not be read")
    elif [file.name for file in files] != [SINGLE]:
        changes.append(f"{INDEX}: written, it was missing")
    return found, changes


def _place(found: dict[str, TensorInfo], name: str) -> str | None:
    return found[name].file.name if name in found else None


def _index_of(folder: Path) -> dict[str, str] | None:
    """Return the entries of the index; None if there is none, or it cannot be read."""
    with suppress(CheckpointError, ValueError, OSError):
        content = read_json(folder / INDEX)
        entries_of = content.get("weight_map") if isinstance(content, dict) else None
        if isinstance(entries_of, dict):
            return {str(name): str(file) for name, file in entries_of.items()}
    return None


def _write_index(output: Path, holders: dict[str, TensorInfo]) -> None:
    content = {
        "metadata": {"total_size": sum(info.nbytes for info in holders.values())},
        "weight_map": {name: info.file.name for name, info in sorted(holders.items())},
    }
    (output / INDEX).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
