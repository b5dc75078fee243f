"""The identity of a run: an unfinished run resumes only if these digests match."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import Shards
from steelyard.model.processor import processor

__all__ = ["digest_of", "identity_of", "sampled_digest", "versions"]

_WHOLE = 16 << 20  # bytes; files up to this size are digested as a whole
_BLOCKS, _BLOCK = 256, 16 << 10  # larger ones: number of sampled blocks, bytes of each
_PACKAGES = ("steelyard", "compressed-tensors", "torch")


def identity_of(
    shards: Shards,
    recipe: str,
    options: dict[str, Any],
    batches: Iterable[Mapping[str, torch.Tensor]] = (),
) -> dict[str, Any]:
    """Return everything that the result depends on, by name, as JSON types.

    batches: the calibration data, if any
    """
    config = (shards.folder / "config.json").read_bytes()
    batches = list(batches)
    return {
        "version": versions(),
        "source": {
            "folder": str(shards.folder.resolve()),
            "config.json": hashlib.sha256(config).hexdigest(),
            **{file.name: _file(file) for file in shards.files},
        },
        "recipe": recipe,
        "options": options,
        "calibration data": digest_of(batches),
        **({"processor": processor()} if batches else {}),
    }


def digest_of(batches: Iterable[Mapping[str, torch.Tensor]]) -> str:
    """Return a digest of calibration data: names, types, shapes and bytes."""
    digest = hashlib.sha256()
    for batch in batches:
        for name, tensor in sorted(batch.items()):
            digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
            digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of the packages that the result depends on."""
    return {name: _version(name) for name in _PACKAGES}


def _file(path: Path) -> str:
    status = path.stat()
    digest = sampled_digest(path)[:16]
    return f"{digest}, {status.st_size} bytes, changed at {status.st_mtime_ns}"


def sampled_digest(path: Path) -> str:
    """Return a digest of a file: of all of it up to 16 MiB, else of 256 evenly spaced blocks.

    Another model of the same size differs in every block. A change of a few bytes may fall between
    them; only the file's modification time shows that.
    """
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        if size <= _WHOLE:
            digest.update(file.read())
        else:
            for index in range(_BLOCKS):  # the first holds the header, the last is the end
                file.seek((size - _BLOCK) * index // (_BLOCKS - 1))
                digest.update(file.read(_BLOCK))
    return digest.hexdigest()


def _version(name: str) -> str:
    try:
        return version(name)
    except Exception:  # not installed as a package, such as a source tree on the path
        return "unknown"
