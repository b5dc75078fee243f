"""Samples of text one by one, for steps that compare distributions over the next token."""

from __future__ import annotations

import torch

from steelyard.data.samples import Samples
from steelyard.errors import DataError

__all__ = ["token_rows"]

_TOKENS = {"input_ids", "attention_mask", "labels"}


def token_rows(samples: Samples, asking: str) -> list[dict[str, torch.Tensor]]:
    """Return the samples one by one, (1, tokens) without padding; without those of one token.

    asking: name of the modifier, for the error if the data is more than text
    """
    found = []
    for batch in samples.batches:
        others = sorted(set(batch) - _TOKENS)
        if others or "input_ids" not in batch:
            raise DataError(
                f"{asking} works with token ids alone, but the data has "
                f"{', '.join(others) or 'none'}: pass text or input_ids, or remove it"
            )
        ids = batch["input_ids"].long()
        mask = batch["attention_mask"].bool() if "attention_mask" in batch else ids >= 0
        rows = (row[real] for row, real in zip(ids, mask, strict=True))
        found += [{"input_ids": row.unsqueeze(0)} for row in rows if len(row) > 1]
    return found
