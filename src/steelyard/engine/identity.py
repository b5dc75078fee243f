"""The identity of a run: an unfinished run resumes only if these digests match."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import Shards
from steelyard.checkpoint.provenance import sampled_digest
from steelyard.model.processor import processor

__all__ = ["digest_of", "identity_of", "versions"]

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


def _version(name: str) -> str:
    try:
        return version(name)
    except Exception:  # not installed as a package, such as a source tree on the path
        return "unknown"
