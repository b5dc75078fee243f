"""Turns one row of calibration data into the token ids of its samples, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from steelyard.data.chat import ChatRenderer
from steelyard.errors import DataError
from steelyard.foreign import printable, reason_of, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowReader", "columns_text", "unpadded"]

CHARACTERS = 32  # characters of a text tokenized at first, per token kept
SPARE = 16  # extra tokens, since the last ones may change when more text follows


@dataclass(frozen=True)
class RowReader:
    """Reads rows of text, of chat messages and of token ids.

    A row is one sample or a batch of them: text, token ids (seq) or (batch, seq), or a mapping with
    `input_ids` and optionally `attention_mask`, with the text column, or with `messages`.

    get_tokenizer: called once, for the first text
    vocab_size:    token ids must be below it
    max_positions: the longest sample that the model can run
    """

    get_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_seq_length: int
    text_column: str = "text"
    vocab_size: int | None = None
    max_positions: int | None = None

    @property
    def text_length(self) -> int:
        """Maximum number of tokens of a text."""
        return min(self.max_seq_length, self.max_positions or self.max_seq_length)

    @cached_property
    def tokenizer(self) -> Any:
        return self.get_tokenizer()

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to look for in a row, in order of preference."""
        if self.text_column != "text":  # requested by the user, so no other will do
            return (self.text_column,)
        return ("input_ids", "text", "messages")

    def samples(self, row: Any, where: str) -> Iterator[torch.Tensor]:
        """Yield the samples of a row, (seq) int64 each, truncated to max_seq_length; may be empty.

        where: the location of the row, for messages
        """
        for ids in self._ids(row, where):
            yield self._checked(ids[: self.max_seq_length], where)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Return all token ids of a text."""
        tokenizer = self.tokenizer
        try:
            # verbose=False: no warning about texts longer than the model's context
            encoded = tokenizer(text, add_special_tokens=special, verbose=False)
            return list(encoded["input_ids"])
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # a panic of tokenizers is no Exception
            raise DataError(
                f"the tokenizer cannot encode the text {show(text)} ({reason_of(error)}); remove "
                "it from the data, or check the tokenizer's files"
            ) from error

    def _start(self, text: str, special: bool = True) -> list[int]:
        """Return the first token ids of a text, without tokenizing all of a long one.

        Token ids are accepted when twice as much text starts with the same ones.
        """
        wanted, length = self.text_length, CHARACTERS * self.text_length
        before: list[int] = []
        while length < len(text):
            ids = self.encode(text[:length], special)[: wanted + SPARE]
            if len(ids) == wanted + SPARE and ids[:wanted] == before:
                return before
            before, length = ids[:wanted], 2 * length
        return self.encode(text, special)[:wanted]

    # -- kinds of rows ----------------------------------------------------------------------

    def _ids(self, row: Any, where: str) -> Iterator[torch.Tensor]:
        if isinstance(row, Mapping):
            yield from self._mapping(row, where)
        elif row is None or isinstance(row, str):
            yield self._text(self._start(row) if row and not row.isspace() else [])
        elif isinstance(row, (list, tuple)) and _is_chat(row):
            yield self._text(self._chat(row, where))
        elif isinstance(row, (list, tuple)) and row and not _is_number(row[0]):
            if len(row) > 1 and all(isinstance(r, torch.Tensor) and r.ndim > 1 for r in row):
                raise DataError(
                    f"{where}: a list of {len(row)} tensors is ambiguous; pass a mapping with "
                    "input_ids and attention_mask"
                )
            for item in row:
                yield from self._ids(item, where)
        else:
            ids = _tensor(row, where)
            yield from ids if ids.ndim == 2 else (ids,)

    def _text(self, ids: list[int]) -> torch.Tensor:
        return torch.tensor(ids[: self.text_length], dtype=torch.int64)

    def _mapping(self, row: Mapping[Any, Any], where: str) -> Iterator[torch.Tensor]:
        column = next((name for name in self.columns if name in row), None)
        if column is None:
            found = columns_text(row)
            raise DataError(
                f"{where}: expected one of the columns {', '.join(self.columns)}, got: {found}; "
                "name the one to read with text_column="
            )
        if column == "input_ids":
            yield from _masked(row["input_ids"], row.get("attention_mask"), where)
        elif row[column] is None or isinstance(row[column], (str, list, tuple)):
            yield from self._ids(row[column], where)
        else:
            kind = type(row[column]).__name__
            raise DataError(f"{where}: expected text in column {column!r}, got a {kind}")

    def _chat(self, messages: Any, where: str) -> list[int]:
        try:
            text = self._renderer.render(list(messages))
        except Exception as error:  # whatever a template raises about these messages
            raise DataError(
                f"{where}: the tokenizer's chat template cannot render the messages: "
                f"{reason_of(error)}"
            ) from error
        return self._start(text, special=False)  # the template adds special tokens

    def _checked(self, ids: torch.Tensor, where: str) -> torch.Tensor:
        if ids.numel() == 0:
            return ids
        if self.max_positions is not None and len(ids) > self.max_positions:
            raise DataError(
                f"{where}: {len(ids)} tokens are more than the {self.max_positions} positions of "
                f"the model; pass max_seq_length={self.max_positions} to truncate them"
            )
        low, high = int(ids.min()), int(ids.max())
        if low < 0:
            raise DataError(
                f"{where}: token id {low} is negative; if it marks padding, remove it or pass an "
                "attention_mask"
            )
        if self.vocab_size is not None and high >= self.vocab_size:
            raise DataError(
                f"{where}: token id {high} is outside the vocabulary of {self.vocab_size}; was it "
                "made with this model's tokenizer?"
            )
        return ids


def columns_text(columns: Iterable[object]) -> str:
    """Return the names of columns for a message.

    >>> columns_text(["a", "b\\n"]), columns_text([])
    ('a, b\\\\n', 'none')
    """
    names = [printable(str(name)[:50]) for name in columns]
    return ", ".join(names[:20]) + (", ..." if len(names) > 20 else "") if names else "none"


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


def _masked(ids: Any, mask: Any, where: str) -> Iterator[torch.Tensor]:
    """Yield the samples of `input_ids`, (seq) or (batch, seq), or a list of unequal rows."""
    if isinstance(ids, (list, tuple)) and ids and not _is_number(ids[0]):
        if mask is not None and len(mask) != len(ids):
            raise DataError(f"{where}: {len(ids)} rows of input_ids, {len(mask)} of attention_mask")
        for i, row in enumerate(ids):
            yield from _masked(row, None if mask is None else mask[i], where)
        return
    tokens = _tensor(ids, where)
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


def _tensor(value: Any, where: str) -> torch.Tensor:
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.number)) or (
        isinstance(value, torch.Tensor) and value.ndim == 0
    )


def _is_chat(row: Any) -> bool:
    return bool(row) and all(isinstance(m, Mapping) and "role" in m for m in row)
