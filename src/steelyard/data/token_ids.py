"""Token ids of a row, of any type that holds numbers, without padding."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from steelyard.errors import DataError

__all__ = ["ids_tensor", "is_number", "masked_rows", "unpadded"]


def unpadded(ids: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """Return the tokens of one sample that the mask keeps, (seq) -> (kept).

    >>> unpadded(torch.tensor([0, 0, 7, 8]), torch.tensor([0, 0, 1, 1]), "sample 0")
    tensor([7, 8])
    """
    if ids.shape != mask.shape:
        raise DataError(
            f"{where}: input_ids has shape {tuple(ids.shape)}, its attention_mask "
            f"{tuple(mask.shape)}"
        )
    kept = mask.nonzero().flatten()
    if kept.numel() and int(kept[-1] - kept[0]) + 1 != kept.numel():
        raise DataError(f"{where}: the attention_mask has a gap; it may only mask padding")
    return ids[kept]


def masked_rows(ids: Any, mask: Any, where: str) -> Iterator[torch.Tensor]:
    """Yield the samples of `input_ids`, (seq) or (batch, seq), or a list of unequal rows."""
    if isinstance(ids, (list, tuple)) and ids and not is_number(ids[0]):
        if mask is not None and len(mask) != len(ids):
            raise DataError(f"{where}: {len(ids)} rows of input_ids, {len(mask)} of attention_mask")
        for i, row in enumerate(ids):
            yield from masked_rows(row, None if mask is None else mask[i], where)
        return
    tokens = ids_tensor(ids, where)
    masks = torch.ones_like(tokens) if mask is None else _mask(mask, where)
    if tokens.ndim == 1:
        yield unpadded(tokens, masks, where)
        return
    if tokens.shape != masks.shape:
        raise DataError(
            f"{where}: input_ids has shape {tuple(tokens.shape)}, its attention_mask "
            f"{tuple(masks.shape)}"
        )
    for row, kept in zip(tokens, masks, strict=True):
        yield unpadded(row, kept, where)


def ids_tensor(value: Any, where: str) -> torch.Tensor:
    """Return token ids as int64 on the CPU, (seq) or (batch, seq)."""
    if not isinstance(value, (torch.Tensor, np.ndarray, list, tuple)):
        raise DataError(
            f"{where} is a {type(value).__name__}; a sample is text, a list or tensor of token "
            "ids, or a mapping with one of them"
        )
    found = _as_tensor(value, where, "token ids")
    whole = not (found.is_floating_point() or found.is_complex() or found.dtype == torch.bool)
    if found.numel() and not whole:
        raise DataError(f"{where}: token ids must be integers, got {found.dtype}")
    if found.ndim not in (1, 2):
        shape = tuple(found.shape)
        raise DataError(f"{where}: token ids must be (seq) or (batch, seq), got {shape}")
    return found.detach().to("cpu", torch.int64)


def _mask(value: Any, where: str) -> torch.Tensor:
    """Return a mask of any type as bool on the CPU."""
    found = _as_tensor(value, where, "the attention_mask").detach().cpu()
    if not ((found == 0) | (found == 1)).all():
        raise DataError(f"{where}: the attention_mask holds values other than 0 and 1")
    return found.bool()


def _as_tensor(value: Any, where: str, what: str) -> torch.Tensor:
    try:
        return value if isinstance(value, torch.Tensor) else torch.tensor(value)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(f"{where}: {what} must be numbers in rows of equal length") from None


def is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (
        isinstance(value, torch.Tensor) and value.ndim == 0
    )
