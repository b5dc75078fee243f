"""Where a checkpoint may be written."""

from __future__ import annotations

import os
from pathlib import Path

from steelyard.errors import CheckpointError

__all__ = ["check_apart", "check_output"]


def check_output(out: Path, overwrite: bool) -> None:
    """Refuse a place that cannot take a checkpoint, or holds something that must not be lost."""
    if out == out.parent:
        raise CheckpointError(f"{out} is the root of all folders; choose a folder for the output")
    if out.exists() and not out.is_dir():
        raise CheckpointError(f"{out} is a file; choose a folder for the output")
    if out.is_dir():
        if os.path.ismount(out):
            raise CheckpointError(
                f"{out} is a mount point, and cannot be replaced in one step; choose a folder "
                f"inside it, such as {out / 'model'}"
            )
        if any(out.iterdir()) and not overwrite:
            raise CheckpointError(
                f"{out} is not empty; choose another folder, or replace what it holds with "
                "overwrite=True"
            )
    parent = out.parent
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise CheckpointError(
            f"{parent} is not a folder that you may write to, so {out} cannot be made in it"
        )


def check_apart(out: Path, source: Path) -> None:
    """Refuse to write over, into or around the checkpoint that is read meanwhile."""
    if out == source:
        raise CheckpointError(f"{out} is the source itself; choose another folder for the output")
    if out in source.parents:
        raise CheckpointError(f"{out} contains the source {source}; choose another output folder")
    if source in out.parents:
        raise CheckpointError(f"{out} lies inside the source {source}; choose another output")
    for file in source.glob("*.safetensors"):  # which may be links
        if out in file.resolve().parents:
            raise CheckpointError(
                f"{file} leads into {out}, which would be replaced; choose another folder for the "
                "output"
            )
