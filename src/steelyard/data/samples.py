"""Selects calibration samples and batches them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from steelyard.data.data_files import Row
from steelyard.data.hub_datasets import Loading
from steelyard.data.limits import check_numbers
from steelyard.data.mappings import Inputs, num_tokens
from steelyard.data.rows import IndexedRows, Rows, collated, mapped, open_rows
from steelyard.data.tokens import RowReader, Sample
from steelyard.errors import DataError
from steelyard.words import count

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["HARDLY_ANY_TOKENS", "Inputs", "Samples", "join_samples", "load_samples"]

FEW_TOKENS = 1024
HARDLY_ANY_TOKENS = 32
MORE = 16  # rows fetched at once to replace empty ones


@dataclass(frozen=True)
class Samples:
    """Samples to calibrate with.

    batches: in the order of sampling; texts have `input_ids` alone, (batch, seq) int64 without
             padding
    rows:    the samples before they were batched
    """

    batches: list[Inputs]
    num_samples: int
    num_tokens: int
    description: str
    rows: list[Sample] = field(default_factory=list, repr=False)

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
    check: Callable[[Inputs, str], None] | None = None,
    data_collator: Callable[[list[Any]], Any] | None = None,
    processor: Callable[[], Any] | None = None,
    features_only: bool = False,
    preprocess: Callable[[Any], Any] | None = None,
    concatenate: bool = False,
    loading: Loading | None = None,
) -> Samples:
    """Load calibration samples from a dataset.

    dataset:      a file (.txt, .jsonl, .csv, .parquet); the name of a dataset on the hub, a short
                  name of `known_datasets` or a folder; a dataset object; a DataFrame; a list of
                  texts; token ids (samples, seq), or a list of lists; mappings with `input_ids` and
                  `attention_mask`; a DataLoader of any of these. Rows may have a text column, or
                  `messages` for the chat template.
    tokenizer:    called for the first text to tokenize
    shuffle:      pick rows by a permutation that depends on `seed` only. Sources without an index
                  (text files, streams, loaders) give their first samples.
    batch_tokens: fill batches up to this many tokens, instead of `batch_size` samples
    vocab_size:   reject token ids at or above it
    max_positions: the longest sample that the model can run; texts are truncated to it, longer
                  token ids are rejected
    check:        raises for inputs that the model does not accept; None reads only token ids
    data_collator: makes one sample of `batch_size` rows
    processor:    called for the first row with images, videos or audio
    features_only: read mappings without pixels or audio features as token ids, whatever else they
                  have
    preprocess:   called with each row, returns the row to read
    concatenate:  join the tokens of all rows, and cut them into samples of `max_seq_length`
    loading:      how to load a dataset by name, instead of `split`
    """
    check_numbers(
        num_calibration_samples=num_calibration_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        batch_tokens=batch_tokens,
        seed=seed,
    )
    reader = RowReader(
        tokenizer,
        max_seq_length,
        text_column,
        vocab_size,
        max_positions,
        check,
        processor,
        features_only,
        preprocess is not None,
        data_collator is not None,
    )
    source = open_rows(dataset, loading or Loading(split), shuffle, reader)
    if preprocess is not None:
        source = mapped(source, preprocess)
    by_index = shuffle and isinstance(source, IndexedRows)
    rows = _shuffled(source, num_calibration_samples, seed) if by_index else iter(source)
    if data_collator is not None:
        rows = collated(rows, data_collator, batch_size)
    length = reader.text_length if concatenate else None
    samples, empty = _take(rows, reader, num_calibration_samples, length)
    if not samples:
        reason = f"its {empty} samples are empty" if empty else "it is empty"
        raise DataError(f"{source.name} holds no calibration data: {reason}")
    made = _collected(samples, batch_size, batch_tokens)
    text = _describe(source, len(samples), num_calibration_samples, made.num_tokens, empty)
    return replace(made, description=text + _truncation(max_seq_length, max_positions))


def join_samples(parts: Sequence[list[Sample]], batch_size: int, description: str) -> Samples:
    """Return the samples of several lists as one, batched anew."""
    made = _collected([sample for part in parts for sample in part], batch_size, None)
    counted = f"{count(made.num_samples, 'sample')} with {count(made.num_tokens, 'token')}"
    return replace(made, description=f"{counted} from {description}")


def _collected(samples: list[Sample], batch_size: int, batch_tokens: int | None) -> Samples:
    tokens = sum(_length(sample) for sample in samples)
    return Samples(
        _batched(samples, batch_size, batch_tokens), len(samples), tokens, "", rows=samples
    )


def _shuffled(source: Any, wanted: int, seed: int) -> Iterator[Row]:
    order = torch.randperm(len(source), generator=torch.Generator().manual_seed(int(seed)))
    yield from source.fetch(order[:wanted].tolist())
    for start in range(wanted, len(order), MORE):
        yield from source.fetch(order[start : start + MORE].tolist())


def _take(
    rows: Iterator[Row], reader: RowReader, wanted: int, length: int | None
) -> tuple[list[Sample], int]:
    """Return the first non-empty samples, and the number of empty ones skipped.

    length: join the token ids of all rows, and cut them into samples of this length
    """
    samples: list[Sample] = []
    rest = torch.empty(0, dtype=torch.int64)
    empty = 0
    for where, row in rows:
        for sample in reader.samples(row, where):
            if _length(sample) == 0:
                empty += 1
                continue
            if length is None:
                samples.append(sample)
            elif isinstance(sample, torch.Tensor):
                *full, rest = torch.split(torch.cat([rest, sample]), length)
                samples += full
            else:
                raise DataError(
                    f"{where}: concatenate_data joins token ids, and this sample has more inputs; "
                    "remove the option"
                )
            if len(samples) >= wanted:
                return samples[:wanted], empty
    if len(rest) == length or (len(rest) and not samples):
        samples.append(rest)
    return samples, empty


def _length(sample: Sample) -> int:
    return len(sample) if isinstance(sample, torch.Tensor) else num_tokens(sample)


def _batched(samples: list[Sample], batch_size: int, batch_tokens: int | None) -> list[Inputs]:
    """Batch token ids of equal length; batches are in the order of their first samples."""
    batches: list[list[torch.Tensor] | Inputs] = []
    filling: dict[int, list[torch.Tensor]] = {}
    for sample in samples:
        if not isinstance(sample, torch.Tensor):  # already a batch
            batches.append(sample)
            continue
        length = len(sample)
        size = batch_size if batch_tokens is None else max(1, batch_tokens // length)
        if length not in filling:
            filling[length] = []
            batches.append(filling[length])
        filling[length].append(sample)
        if len(filling[length]) == size:
            del filling[length]
    return [{"input_ids": torch.stack(b)} if isinstance(b, list) else b for b in batches]


def _describe(source: Rows, taken: int, wanted: int, num_tokens: int, empty: int) -> str:
    text = f"{count(taken, 'sample')} with {count(num_tokens, 'token')} from {source.name}"
    if taken < wanted:
        text += f"; {wanted} were requested, but it has no more"
    return f"{text}; skipped {count(empty, 'empty one')}" if empty else text


def _truncation(max_seq_length: int, max_positions: int | None) -> str:
    if max_positions is None or max_seq_length <= max_positions:
        return ""
    return f"; truncated to the model's {max_positions} positions, not {max_seq_length}"
