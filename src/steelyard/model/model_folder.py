"""Finds the folder of a model, and downloads a model of the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch.nn import Module

from steelyard.errors import PipelineError

__all__ = ["model_folder", "model_name"]

_OTHER_KINDS = ["*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "original/*"]


def model_folder(model: Any, revision: str | None = None) -> Path:
    """Return the folder of a model; download a hub model, with its safetensors weights only."""
    if not isinstance(model, (str, Path)):
        raise PipelineError(
            f"model is a {type(model).__name__}; pass a folder, a name on the hub, or a model"
        )
    folder = Path(model)
    if folder.is_dir():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(str(model), revision=revision, ignore_patterns=_OTHER_KINDS))
    except Exception as error:
        raise PipelineError(
            f"{str(model)!r} is not a folder, and it cannot be downloaded from the hub: {error}"
        ) from None


def model_name(model: Any) -> str:
    """Return a model's name on the hub, or the name of its folder or class."""
    given = getattr(model, "name_or_path", "") if isinstance(model, Module) else str(model)
    if not given:
        return type(model).__name__
    return Path(given).resolve().name if Path(given).is_dir() else str(given)
