"""Finds the folder of the demo model."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from steelyard.errors import CheckpointError

__all__ = ["model_folder"]


def model_folder() -> Path:
    """Return the installed Hugging Face folder of the demo model.

    It is part of the package: write quantized copies somewhere else.
    """
    folder = resources.files("steelyard.demo") / "model"
    if not (isinstance(folder, Path) and (folder / "model.safetensors").is_file()):
        raise CheckpointError(
            f"the demo model is not at {folder}: install the package as files (pip install), "
            "not as a zip archive"
        )
    return folder
