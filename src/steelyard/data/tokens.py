"""Turns one row of calibration data into the token ids of its samples, without padding."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from steelyard.data.chat import ChatRenderer
from steelyard.data.mappings import Inputs, has_features, model_inputs
from steelyard.data.media import MediaReader, has_media
from steelyard.data.token_ids import ids_tensor, is_number, masked_rows
from steelyard.errors import DataError
from steelyard.foreign import printable, reason_of, show

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowReader", "Sample", "columns_text"]

Sample = torch.Tensor | Inputs
"""Token ids (seq), to be batched with others; or complete inputs of the model."""

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
    check:         raises for inputs that the model does not accept; None reads only token ids
    get_processor: called once, for the first row with images, videos or audio
    features_only: read rows without pixels or audio features as token ids, whatever else they have
    prepares:      the caller's own function turns rows into what is read here
    collates:      the caller's own function collates rows that are tokenized or processed
    """

    get_tokenizer: Callable[[], PreTrainedTokenizerBase]
    max_seq_length: int
    text_column: str = "text"
    vocab_size: int | None = None
    max_positions: int | None = None
    check: Callable[[Inputs, str], None] | None = None
    get_processor: Callable[[], Any] | None = None
    features_only: bool = False
    prepares: bool = False
    collates: bool = False

    def has_template(self) -> bool:
        """Whether the tokenizer can render messages."""
        return getattr(self.tokenizer, "chat_template", None) is not None

    @property
    def text_length(self) -> int:
        """Maximum number of tokens of a text."""
        return min(self.max_seq_length, self.max_positions or self.max_seq_length)

    @cached_property
    def tokenizer(self) -> Any:
        found = self.get_tokenizer()
        return getattr(found, "tokenizer", found)  # a processor has one

    @cached_property
    def _renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    @cached_property
    def _media(self) -> MediaReader | None:
        made = self.get_processor
        return None if made is None else MediaReader(made, self.text_column)

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to look for in a row, in order of preference."""
        if self.text_column != "text":  # requested by the user, so no other will do
            return (self.text_column,)
        return ("input_ids", "text", "messages")

    def features(self, row: Any, where: str) -> dict[str, Any]:
        """Return a row of text or media for a collator: tokenized, or made by the processor."""
        if has_media(row) and self._media is not None:
            return self._media.features(row, where)
        ids = next(self._ids(row, where)).tolist()
        return {"input_ids": ids, "attention_mask": [1] * len(ids)}

    def samples(self, row: Any, where: str) -> Iterator[Sample]:
        """Yield the samples of a row; may be empty.

        Token ids are (seq) int64, truncated to max_seq_length.

        where: the location of the row, for messages
        """
        inputs = self._inputs(row, where)
        if inputs is not None:
            yield inputs
            return
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
        elif isinstance(row, (list, tuple)) and row and not is_number(row[0]):
            if len(row) > 1 and all(isinstance(r, torch.Tensor) and r.ndim > 1 for r in row):
                raise DataError(
                    f"{where}: a list of {len(row)} tensors is ambiguous; pass a mapping with "
                    "input_ids and attention_mask"
                )
            for item in row:
                yield from self._ids(item, where)
        else:
            ids = ids_tensor(row, where)
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
            yield from masked_rows(row["input_ids"], row.get("attention_mask"), where)
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

    def _inputs(self, row: Any, where: str) -> Inputs | None:
        """Return the model's inputs for a row that is more than text or token ids."""
        if not isinstance(row, Mapping):
            return None
        if has_media(row) and "input_ids" not in row:
            if self._media is None:
                raise DataError(
                    f"{where} has images or audio, and only text is read here; remove them"
                )
            inputs: Inputs | None = self._media.inputs(row, where)
        else:
            is_text = self.text_column != "text" and self.text_column in row
            is_text |= self.features_only and not has_features(row)
            inputs = None if is_text or self.check is None else model_inputs(row, where)
            if self.check is None:
                _token_ids_alone(row, where)
        if inputs is None:
            return None
        if self.check is not None:
            self.check(inputs, where)
        for name in ("input_ids", "decoder_input_ids"):
            for ids in inputs.get(name, ()):
                self._checked(ids_tensor(ids, where), where)
        return inputs

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


def _token_ids_alone(row: Mapping[Any, Any], where: str) -> None:
    """Reject pixels or audio where only token ids are read; labels and the like change nothing."""
    for name, value in row.items():
        is_float = "float" in str(getattr(value, "dtype", ""))
        if is_float and getattr(value, "ndim", 0) > 1 and name != "attention_mask":
            shown = printable(str(name))
            raise DataError(f"{where} has {shown}, and only token ids are read here; remove it")


def _is_chat(row: Any) -> bool:
    return bool(row) and all(isinstance(m, Mapping) and "role" in m for m in row)
