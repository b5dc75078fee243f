"""NaN and infinity in tensors that are only copied; observers check those that are quantized."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from steelyard.checkpoint.shards import Shards
from steelyard.errors import NonFiniteError
from steelyard.observers.type_checks import describe_non_finite

__all__ = ["check_finite", "finite_pieces"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_finite(name: str, tensor: torch.Tensor) -> None:
    """Raise `NonFiniteError` if a tensor of floats holds NaN or infinity.

    A scalar may: in fp16, the constant that masks attention is infinite.
    """
    if tensor.ndim and not _is_finite(tensor):
        raise NonFiniteError(describe_non_finite(tensor, name))


def finite_pieces(name: str, source: Shards) -> Iterator[Any]:
    """Yield the bytes of a tensor, a piece at a time; raise if a value is not finite."""
    info = source.info(name)
    checked = bool(info.shape) and info.dtype in _FLOATS
    for piece in source.pieces(name):
        if checked and not _is_finite(torch.frombuffer(piece, dtype=info.dtype)):
            check_finite(name, source.read(name))  # the whole tensor, to say how many and where
        yield piece


def _is_finite(tensor: torch.Tensor) -> bool:
    if tensor.dtype not in _FLOATS or tensor.numel() == 0:
        return True
    low, high = torch.aminmax(tensor.detach())  # NaN propagates
    return bool(torch.isfinite(low) & torch.isfinite(high))
