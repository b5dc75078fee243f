"""The first tokens of a layer's call, for measurements that need only some of them."""

from __future__ import annotations

from typing import Any

import torch

from steelyard.model.placeholders import first_tensor, replaced

__all__ = ["first_tokens"]


def first_tokens(call: Any, most: int) -> Any:
    """Return a layer's arguments with at most `most` tokens of all samples together.

    Tensors are cut along each dimension that is as long as the samples. None if the call has not
    twice as many tokens, or if another dimension of its hidden state is as long.

    >>> args, kwargs = first_tokens(((torch.zeros(2, 8, 3),), {"mask": torch.ones(1, 1, 8, 8)}), 4)
    >>> args[0].shape, kwargs["mask"].shape
    (torch.Size([2, 2, 3]), torch.Size([1, 1, 2, 2]))
    """
    hidden = first_tensor(call)
    if hidden is None or hidden.ndim != 3:
        return None
    samples, length, width = hidden.shape
    kept = most // samples
    if kept < 1 or length < 2 * kept or length in (samples, width):
        return None

    def cut(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        for dimension, size in enumerate(value.shape):
            if size == length:
                value = value.narrow(dimension, 0, kept)
        return value

    return replaced(call, cut)
