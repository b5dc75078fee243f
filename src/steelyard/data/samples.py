"""Selects calibration samples and batches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from steelyard.data.data_files import Row
from steelyard.data.limits import check_numbers
from steelyard.data.rows import IndexedRows, Rows, open_rows
from steelyard.data.tokens import RowReader
from steelyard.errors import DataError
from steelyard.words import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HARDLY_ANY_TOKENS", "Samples", "load_samples"]

FEW_TOKENS = 1024
HARDLY_ANY_TOKENS = 32
MORE = 16  # rows fetched at once to replace empty ones


@dataclass(frozen=True)
class Samples:
    """Token ids to calibrate with.

    batches: (batch, seq) int64 each, without padding, in the order of sampling
    """

    batches: list[torch.Tensor]
    num_samples: int
    num_tokens: int
    description: str

    def shortage(self) -> str | None:
        """Return a warning if there are too few tokens to represent the model's use."""
        if self.num_tokens >= FEW_TOKENS:
            return None
        tokens = "1 token" if self.num_tokens == 1 else f"{self.num_tokens} tokens"
        return (
            f"calibrating on {tokens} only: scales and rounding will overfit; "
            f"use at least {FEW_TOKENS}, better hundreds of samples"
        )


def load_samples(
    dataset: Any,
    *,
    tokenizer: Callable[[], PreTrainedTokenizerBase],
    num_calibration_samples: int = 512,
    max_seq_length: int = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    split: str | None = None,
    shuffle: bool = True,
    seed: int = 0,
    batch_tokens: int | None = None,
    vocab_size: int | None = None,
    max_positions: int | None = None,
) -> Samples:
    """Load calibration samples from a dataset.

    dataset:      a file (.txt, .jsonl, .parquet); the name of a dataset on the hub or a folder,
                  or a dataset object; a DataFrame; a list of texts; token ids (samples, seq), or a
                  list of lists; mappings with `input_ids` and `attention_mask`; a DataLoader of any
                  of these. Rows may have a text column, or `messages` for the chat template.
    tokenizer:    called when the first text has to be tokenized
    shuffle:      pick rows by a permutation that depends on `seed` only. Sources without an index
                  (text files, streams, loaders) give their first samples.
    batch_tokens: fill batches up to this many tokens, instead of `batch_size` samples
    vocab_size:   refuse token ids at or above it
    max_positions: the longest sample that the model can run; texts are truncated to it, longer
                  token ids are refused
    """
    check_numbers(
        num_calibration_samples=num_calibration_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        seed=seed,
    )
    reader = RowReader(tokenizer, max_seq_length, text_column, vocab_size, max_positions)
    source = open_rows(dataset, split, shuffle, reader)
    by_index = shuffle and isinstance(source, IndexedRows)
    rows = _shuffled(source, num_calibration_samples, seed) if by_index else iter(source)
    samples, empty = _take(rows, reader, num_calibration_samples)
    if not samples:
        reason = f"its {empty} samples are empty" if empty else "it is empty"
        raise DataError(f"{source.name} holds no calibration data: {reason}")
    num_tokens = sum(len(ids) for ids in samples)
    return Samples(
        _batched(samples, batch_size, batch_tokens),
        len(samples),
        num_tokens,
        _describe(source, len(samples), num_calibration_samples, num_tokens, empty)
        + _truncation(max_seq_length, max_positions),
    )


def _shuffled(source: Any, wanted: int, seed: int) -> Iterator[Row]:
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(int(seed)))
    yield from source.fetch(order[:wanted].tolist())
    for start in range(wanted, len(order), MORE):
        yield from source.fetch(order[start : start + MORE].tolist())


def _take(rows: Iterator[Row], reader: RowReader, wanted: int) -> tuple[list[torch.Tensor], int]:
    """Return the first non-empty samples, and the number of empty ones skipped."""
    samples: list[torch.Tensor] = []
    empty = 0
    for where, row in rows:
        for ids in reader.samples(row, where):
            if ids.numel() == 0:
                empty += 1
                continue
            samples.append(ids)
            if len(samples) == wanted:
                return samples, empty
    return samples, empty


def _batched(
    samples: list[torch.Tensor], batch_size: int, batch_tokens: int | None
) -> list[torch.Tensor]:
    """Batch samples of equal length; batches are in the order of their first samples."""
    batches: list[list[torch.Tensor]] = []
    filling: dict[int, list[torch.Tensor]] = {}
    for ids in samples:
        length = len(ids)
        size = batch_size if batch_tokens is None else max(1, batch_tokens // length)
        if length not in filling:
            filling[length] = []
            batches.append(filling[length])
        filling[length].append(ids)
        if len(filling[length]) == size:
            del filling[length]
    return [torch.stack(batch) for batch in batches]


def _describe(source: Rows, taken: int, wanted: int, num_tokens: int, empty: int) -> str:
    text = f"{count(taken, 'sample')} with {count(num_tokens, 'token')} from {source.name}"
    if taken < wanted:
        text += f"; {wanted} were requested, but it has no more"
    return f"{text}; skipped {count(empty, 'empty one')}" if empty else text


def _truncation(max_seq_length: int, max_positions: int | None) -> str:
    if max_positions is None or max_seq_length <= max_positions:
        return ""
    return f"; truncated to the model's {max_positions} positions, not {max_seq_length}"
