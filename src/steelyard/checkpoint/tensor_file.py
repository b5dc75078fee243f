"""Writes a safetensors file, with the system's own errors."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

__all__ = ["save_tensors"]

_NUMBER = re.compile(r"os error (\d+)")


def save_tensors(
    tensors: Mapping[str, torch.Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write a safetensors file; raises OSError, as `open` does.

    safetensors itself reports a full disk only in the text of its own error.
    """
    try:
        save_file(dict(tensors), path, metadata=metadata)
    except SafetensorError as error:
        found = _NUMBER.search(str(error))
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), str(path)) from error
