"""Decides which tokens of a batch are scored: text, but for the first token of each sample.

A placeholder stands for a part of an image or of audio. The model does not predict it, and neither
is padding predicted.
"""

from __future__ import annotations

from typing import Any

import torch

from steelyard.data.samples import Inputs
from steelyard.errors import DataError

__all__ = ["check_scorable", "placeholder_ids", "scored_targets"]

_KINDS = ("image", "video", "audio")
_NAMES = tuple(f"{kind}_token_{name}" for kind in _KINDS for name in ("id", "index"))


def placeholder_ids(config: Any) -> list[int]:
    """Return the token ids that stand for images, videos and audio in a model's input."""
    found = {getattr(config, name, None) for name in _NAMES}
    return sorted(each for each in found if isinstance(each, int))


def scored_targets(inputs: Inputs, placeholders: list[int]) -> torch.Tensor:
    """Return which next tokens are scored, (batch, seq - 1) bool.

    Samples of token ids alone have neither padding nor placeholders.

    >>> ids = torch.tensor([[0, 0, 5, 9, 9, 6, 7]])
    >>> scored_targets({"input_ids": ids, "attention_mask": ids > 0}, [9]).int()
    tensor([[0, 0, 0, 0, 1, 1]], dtype=torch.int32)
    """
    targets = inputs["input_ids"][:, 1:]
    if set(inputs) == {"input_ids"}:
        return torch.ones_like(targets, dtype=torch.bool)
    scored = ~torch.isin(targets, torch.tensor(placeholders, dtype=targets.dtype))
    if "attention_mask" in inputs:
        mask = inputs["attention_mask"].bool()
        scored &= mask[:, :-1] & mask[:, 1:]  # the first token after padding has no context
    if "mm_token_type_ids" in inputs:
        scored &= inputs["mm_token_type_ids"][:, 1:] == 0
    return scored


def check_scorable(inputs: Inputs, where: str) -> None:
    """Raise a DataError for inputs without token ids, or with masks of other shapes.

    where: the sample, for messages
    """
    if "input_ids" not in inputs:
        raise DataError(
            f"{where} has {', '.join(inputs)} but no input_ids, so it has no token to score; pass "
            "input_ids too, or text for the processor"
        )
    shape = inputs["input_ids"].shape
    for name in ("attention_mask", "mm_token_type_ids"):
        if name in inputs and inputs[name].shape != shape:
            raise DataError(
                f"{where}: {name} is {tuple(inputs[name].shape)}, and input_ids is "
                f"{tuple(shape)}; pass one value for each token, as a processor does"
            )
