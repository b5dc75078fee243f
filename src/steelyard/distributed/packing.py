"""Values as bytes, the form in which ranks send them to each other."""

from __future__ import annotations

import io
import pickle
from typing import Any

import torch

__all__ = ["pack", "unpack"]


class _Pickler(pickle.Pickler):
    """Sends tensors as their bytes: torch's own way does not know all types."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def pack(value: Any) -> torch.Tensor:
    """Return a value as bytes, (n,) uint8."""
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


def unpack(data: torch.Tensor) -> Any:
    """Return what `pack` was given; its tensors have memory of their own."""
    return pickle.loads(data.numpy().tobytes())
