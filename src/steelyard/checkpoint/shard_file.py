"""One safetensors file, written as its tensors come.

The format begins with a header that tells where each tensor lies, so usually all of them are
gathered first. Here room is left for the header, which may be padded with spaces, and the bytes
follow at once. Tensors must lie at multiples of their element's size: those of odd sizes, which are
small, wait until the end.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint.shards import DTYPE_NAMES

__all__ = ["ShardFile"]

_ROOM = 1 << 18  # for the header; enough for some 2,000 tensors
_ALIGNED = 8


class ShardFile:
    """Takes tensors until `close`; holds only those whose size is not a multiple of 8 bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.names: list[str] = []
        self.nbytes = 0
        self._written = 0
        self._entries: dict[str, dict[str, Any]] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self._stream = path.open("wb")
        self._stream.seek(8 + _ROOM)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """tensor: on the CPU, contiguous"""
        self.names.append(name)
        self.nbytes += tensor.nbytes
        if tensor.nbytes % _ALIGNED:
            self._waiting[name] = tensor.clone()
        else:
            self._write(name, tensor)

    def _write(self, name: str, tensor: torch.Tensor) -> None:
        if tensor.nbytes:
            raw: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            self._stream.write(memoryview(raw))
        end = self._written + tensor.nbytes
        self._entries[name] = {
            "dtype": DTYPE_NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [self._written, end],
        }
        self._written = end

    def close(self) -> None:
        """Write what waited, and the header."""
        for name, tensor in sorted(self._waiting.items(), key=lambda i: -i[1].element_size()):
            self._write(name, tensor)
        self._waiting.clear()
        content = {"__metadata__": {"format": "pt"}, **self._entries}
        header = json.dumps(content, separators=(",", ":")).encode()
        if len(header) > _ROOM:
            self._stream.close()
            self._move_behind(header)
            return
        self._stream.seek(0)
        self._stream.write(_ROOM.to_bytes(8, "little") + header.ljust(_ROOM))
        self._stream.close()

    def _move_behind(self, header: bytes) -> None:
        """Write the file once more, behind a header that outgrew its room."""
        header = header.ljust(-(-len(header) // _ALIGNED) * _ALIGNED)
        longer = self.path.with_suffix(".longer")
        with self.path.open("rb") as data, longer.open("wb") as stream:
            stream.write(len(header).to_bytes(8, "little") + header)
            data.seek(8 + _ROOM)
            shutil.copyfileobj(data, stream, 1 << 22)
        longer.replace(self.path)

    def abandon(self) -> None:
        self._stream.close()
