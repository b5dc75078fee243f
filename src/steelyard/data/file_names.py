"""Tells a file of data from the name of a dataset. Without torch: a mistake shows at once."""

from __future__ import annotations

import re
from pathlib import Path

from steelyard.errors import DataError

__all__ = ["FILES", "data_file"]

FILES = {
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".raw": "text",
    "": "text",
    ".jsonl": "json",
    ".json": "json",
    ".parquet": "parquet",
    ".csv": "csv",
}
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


def data_file(dataset: str | Path) -> Path | None:
    """Return the file, or None for a folder or the name of a dataset; raise if it is missing."""
    path, name = Path(dataset), str(dataset)
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except (OSError, ValueError):  # too long, or with a NUL: a text, not a name
        is_file = is_folder = False
    if is_file:
        return path
    known = path.suffix.lower() in FILES and path.suffix != ""
    if is_folder or (isinstance(dataset, str) and _HUB_NAME.fullmatch(name) and not known):
        return None
    shown = name if len(name) <= 80 else f"{name[:77]}..."
    raise DataError(
        f"there is no file {shown!r}: pass a file, the name of a dataset, or a list of texts"
    )
