"""What a run is made of: with the same of it, an unfinished run may be taken up again."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from importlib.metadata import version
from typing import Any

import torch

from steelyard.checkpoint import Shards

__all__ = ["digest_of", "identity_of", "versions"]

_PACKAGES = ("steelyard", "compressed-tensors", "torch")


def identity_of(
    shards: Shards, recipe: str, options: dict[str, Any], tokens: Iterable[torch.Tensor] = ()
) -> dict[str, Any]:
    """Return all that the result depends on, by name, in JSON's types.

    tokens: the calibration data, if there is any
    """
    config = (shards.folder / "config.json").read_bytes()
    return {
        "version": versions(),
        "source": {
            "folder": str(shards.folder.resolve()),
            "config.json": hashlib.sha256(config).hexdigest(),
            **{file.name: _file(file) for file in shards.files},
        },
        "recipe": recipe,
        "options": options,
        "calibration data": digest_of(tokens),
    }


def digest_of(tokens: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for batch in tokens:
        digest.update(str(tuple(batch.shape)).encode() + batch.contiguous().numpy().tobytes())
    return digest.hexdigest()


def versions() -> dict[str, str]:
    """Return those of the packages that the result depends on."""
    return {name: _version(name) for name in _PACKAGES}


def _file(path: Any) -> str:
    status = path.stat()
    return f"{status.st_size} bytes, changed at {status.st_mtime_ns}"


def _version(name: str) -> str:
    try:
        return version(name)
    except Exception:  # not installed as a package, such as a source tree on the path
        return "unknown"
