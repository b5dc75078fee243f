"""Samples that are mappings of tensors: token ids with pixels, audio features, masks or labels.

The output of a processor goes to the model unchanged. A row with only token ids is no such sample:
`tokens` reads it, removes its padding, and batches it with others of its length.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from steelyard.errors import DataError
from steelyard.foreign import printable

__all__ = ["TOKENS", "Inputs", "has_features", "model_inputs", "num_tokens"]

Inputs = dict[str, torch.Tensor]
"""Arguments of a model's forward, by name."""

TOKENS = ("input_ids", "attention_mask")
_COUNTED = ("input_ids", "decoder_input_ids", "labels")


def model_inputs(row: Mapping[Any, Any], where: str) -> Inputs | None:
    """Return the tensors of a row; None for rows with only token ids, or without tensors.

    Skips text, single numbers and other columns that are not tensors.
    """
    if all(not _is_numbers(value) for name, value in row.items() if name not in TOKENS):
        return None
    given = {str(k): _tensor(v, str(k), where) for k, v in row.items() if _is_numbers(v)}
    return _batched(given, where)


def has_features(row: Mapping[Any, Any]) -> bool:
    """Whether a row has pixels or audio features: numbers of 3 dimensions, or floats of 2.

    >>> has_features({"input_ids": [[5, 6]], "labels": [[5, 6]]})
    False
    >>> has_features({"input_ids": [[5, 6]], "pixel_values": [[0.5, 1.0]]})
    True
    """
    return any(_is_feature(v) for k, v in row.items() if k not in TOKENS and _is_numbers(v))


def num_tokens(inputs: Mapping[str, torch.Tensor]) -> int:
    """Return the number of tokens that count; the frames of audio-only input."""
    masks = [inputs[name] for name in ("attention_mask", "loss_mask") if name in inputs]
    if masks and all(mask.ndim == 2 for mask in masks):
        return int(functools.reduce(torch.logical_and, masks).count_nonzero())
    counted = next((inputs[name] for name in _COUNTED if name in inputs), None)
    if counted is not None:
        return counted.numel()
    first = next(iter(inputs.values()))
    return int(first.shape[0] * first.shape[-1])


def _batched(given: Inputs, where: str) -> Inputs:
    """Add the batch dimension to a row whose token ids have none, as a default collator does."""
    ids = given.get("input_ids", given.get("decoder_input_ids"))
    if ids is None or ids.ndim == 2:
        return given
    if ids.ndim != 1:
        raise DataError(
            f"{where}: input_ids has shape {tuple(ids.shape)}; pass (seq), or (1, seq) as a "
            "processor does"
        )
    return {name: value[None] for name, value in given.items()}


def _is_numbers(value: Any) -> bool:
    """Whether a value is a tensor, an array, or a nested list of numbers."""
    while isinstance(value, (list, tuple)) and value:
        value = value[0]
        if isinstance(value, (bool, int, float, np.number)):
            return True
    return isinstance(value, (torch.Tensor, np.ndarray)) and value.ndim > 0


def _is_feature(value: Any) -> bool:
    dimensions = 0
    while isinstance(value, (list, tuple)) and value:
        value, dimensions = value[0], dimensions + 1
    is_float = isinstance(value, float) or "float" in str(getattr(value, "dtype", ""))
    dimensions += getattr(value, "ndim", 0)
    return dimensions > 2 or (is_float and dimensions > 1)


def _tensor(value: Any, name: str, where: str) -> torch.Tensor:
    try:
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
            value = torch.stack(list(value))
        elif isinstance(value, (list, tuple)):
            value = np.asarray(value)
        found = torch.as_tensor(value).detach().cpu()
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"{where}: {printable(name)} must be numbers in rows of equal length"
        ) from None
    if found.is_floating_point() and found.dtype == torch.float64:
        found = found.float()  # Python's own floats
    return found
