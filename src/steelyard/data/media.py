"""Turns rows with images, videos or audio into model inputs, through the model's processor.

    {"text": "<image> What is this?", "image": picture}
    {"messages": [{"role": "user", "content": [{"type": "image"}, ...]}], "images": [picture]}
    {"audio": {"array": samples, "sampling_rate": 16000}, "text": "the transcript"}

An image is a PIL image, an array, a file, an address, or the bytes that datasets store.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property
from typing import Any

from steelyard.data.chat import ChatRenderer
from steelyard.data.mappings import TOKENS, Inputs, model_inputs
from steelyard.errors import DataError
from steelyard.foreign import reason_of

__all__ = ["COLUMNS", "MediaReader", "has_media"]

COLUMNS = {
    "image": "images",
    "images": "images",
    "video": "videos",
    "videos": "videos",
    "audio": "audio",
    "audios": "audio",
}
"""Column of a dataset -> the processor's name for it."""

_PARTS = {**COLUMNS, "image_url": "images", "audio_url": "audio", "input_audio": "audio"}
_PLACES = ("url", "path", "base64")  # keys of message content that may hold the media


def has_media(row: Any) -> bool:
    """Whether a row has images, videos or audio, in a column or in its messages."""
    if not isinstance(row, Mapping):
        return False
    columns = any(row.get(name) is not None for name in COLUMNS)
    return columns or any(_kind(part) for part in _parts(row.get("messages")))


class MediaReader:
    """Reads rows with images, videos or audio.

    get_processor: called once, for the first such row
    """

    def __init__(self, get_processor: Callable[[], Any], text_column: str) -> None:
        self._get_processor = get_processor
        self._text_column = text_column

    @cached_property
    def _processor(self) -> Any:
        return self._get_processor()

    @cached_property
    def _renderer(self) -> ChatRenderer:
        tokenizer = getattr(self._processor, "tokenizer", self._processor)
        return ChatRenderer(tokenizer, getattr(self._processor, "chat_template", None))

    def inputs(self, row: Mapping[str, Any], where: str) -> Inputs:
        """Return the processor's output for a row, a batch of one."""
        made = self._made(row, where, return_tensors="pt")
        found = model_inputs(made, where)
        if found is None:
            raise DataError(
                f"{where}: {type(self._processor).__name__} made only {', '.join(made)} of the "
                f"sample's {', '.join(_media(row))}; use the model's own processor"
            )
        return found

    def features(self, row: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the same for a collator: token ids, and lists of one item, without batch."""
        made = self._made(row, where)
        listed = {name for name, value in made.items() if isinstance(value, list)}
        single = {name for name in listed.union(TOKENS) & made.keys() if len(made[name]) == 1}
        return {name: value[0] if name in single else value for name, value in made.items()}

    def _made(self, row: Mapping[str, Any], where: str, **more: Any) -> Any:
        given = _media(row)
        text = self._text(row, where)
        options: dict[str, Any] = {} if text is None else {"text": [text]}
        try:
            if "audio" in given:
                given["audio"], rate = _sounds(given["audio"])
                options |= {} if rate is None else {"sampling_rate": rate}
            if "images" in given:
                given["images"] = [_picture(image) for image in given["images"]]
            return self._processor(**options, **given, **more)
        except (KeyboardInterrupt, SystemExit, MemoryError, DataError):
            raise
        except Exception as error:
            raise DataError(
                f"{where}: {type(self._processor).__name__} cannot process the sample's "
                f"{', '.join(given)} ({reason_of(error)}); process the data yourself, and pass "
                "samples with the model's inputs"
            ) from error

    def _text(self, row: Mapping[str, Any], where: str) -> str | None:
        if row.get("messages") is None:
            text = row.get(self._text_column)
            return text if isinstance(text, str) else None
        messages = [{**m, "content": _shown(m.get("content"))} for m in row["messages"]]
        try:
            return self._renderer.render(messages)
        except Exception as error:  # whatever a template raises about these messages
            raise DataError(
                f"{where}: the processor's chat template cannot render the messages: "
                f"{reason_of(error)}"
            ) from error


def _parts(messages: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of the contents of messages that are not plain text."""
    for message in messages if isinstance(messages, (list, tuple)) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, (list, tuple)) else ():
            if isinstance(part, Mapping):
                yield part


def _kind(part: Mapping[str, Any]) -> str | None:
    return _PARTS.get(str(part.get("type")))


def _shown(content: Any) -> Any:
    """Return the content of a message for the template: without pixels or audio samples."""
    if not isinstance(content, (list, tuple)):
        return content
    return [{"type": p["type"]} if isinstance(p, Mapping) and _kind(p) else p for p in content]


def _media(row: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the media of columns and messages, by the processor's names."""
    found: dict[str, list[Any]] = {}
    for name, kind in COLUMNS.items():
        if row.get(name) is not None:
            value = row[name]
            many = isinstance(value, (list, tuple)) and not _is_number(value)
            found.setdefault(kind, []).extend(value if many else [value])
    for part in _parts(row.get("messages")):
        kind_of = _kind(part)
        named = [part.get(key) for key in (str(part.get("type")), *_PLACES)]
        value = next((v for v in named if v is not None), None)
        if kind_of is not None and value is not None:
            address = value.get("url") if isinstance(value, Mapping) else None
            found.setdefault(kind_of, []).append(address or value)
    return found


def _picture(image: Any) -> Any:
    if isinstance(image, Mapping) and image.get("bytes") is not None:  # as stored by datasets
        from PIL import Image

        return Image.open(io.BytesIO(image["bytes"]))
    if isinstance(image, Mapping) and image.get("path") is not None:
        image = image["path"]
    if isinstance(image, str):
        from transformers.image_utils import load_image

        return load_image(image)
    return image


def _sounds(values: list[Any]) -> tuple[list[Any], int | None]:
    """Return the samples of each audio clip, and their common sampling rate if known."""
    rates = set()
    found = []
    for value in values:
        if hasattr(value, "get_all_samples"):  # a decoder of datasets
            samples = value.get_all_samples()
            rates.add(int(samples.sample_rate))
            found.append(samples.data.mean(0).numpy())
        elif isinstance(value, Mapping) and "array" in value:
            rates.add(int(value["sampling_rate"]))
            found.append(value["array"])
        else:
            found.append(value)
    if len(rates) > 1:
        raise DataError(f"audio clips of one sample have different sampling rates: {sorted(rates)}")
    return found, next(iter(rates), None)


def _is_number(values: Any) -> bool:
    return bool(values) and isinstance(values[0], (int, float))
