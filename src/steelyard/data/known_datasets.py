"""Datasets that llm-compressor knows by a short name, as data: where they are, what a row becomes.

    oneshot(model, recipe, dataset="open_platypus", splits="train[:512]")

The texts that rows become are this package's own; `preprocessing_func` replaces them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["DEMO", "KNOWN", "KnownDataset", "known_dataset"]

DEMO = "demo"
"""The name of the built-in text: the source code of Python's standard library."""


@dataclass(frozen=True)
class KnownDataset:
    """A dataset on the hub.

    hub:      its name there
    split:    the default
    config:   the default; None if it has only one
    suffix:   added to a split "train" or "test"
    template: a text with the names of columns in braces; paragraphs of empty columns are dropped
    chat:     the column that holds a conversation, and its keys for a role and a text
    image:    the columns of an image and its captions
    audio:    the columns of a recording and its transcript
    stream:   too large to download as a whole
    """

    hub: str
    split: str = "train"
    config: str | None = None
    suffix: str = ""
    template: str | None = None
    chat: tuple[str, str, str] | None = None
    image: tuple[str, str] | None = None
    audio: tuple[str, str] | None = None
    stream: bool = False

    def split_named(self, split: str | None) -> str:
        """Return the split of the hub for the one that a caller names.

        >>> KNOWN["ultrachat_200k"].split_named("train[:5%]")
        'train_sft[:5%]'
        """
        if split is None:
            return self.split
        name, bracket, rest = split.partition("[")
        return f"{name}{self.suffix * (name in ('train', 'test'))}{bracket}{rest}"

    def row(self, row: Mapping[str, Any], has_template: Callable[[], bool]) -> dict[str, Any]:
        """Return what is read of a row: text, messages, or media with text.

        has_template: whether the tokenizer can render messages; else they become plain text
        """
        if self.template is not None:
            return {"text": _filled(self.template, row)}
        if self.chat is not None:
            messages = _messages(row, *self.chat)
            return {"messages": messages} if has_template() else {"text": _plain(messages)}
        if self.image is not None:
            image, captions = self.image
            return {"messages": _described(row[captions]), "images": [row[image]]}
        if self.audio is not None:
            recording, transcript = self.audio
            return {"audio": row[recording], "text": row[transcript]}
        return dict(row)


KNOWN = {
    "c4": KnownDataset("allenai/c4", config="en", stream=True),
    "cnn_dailymail": KnownDataset(
        "abisee/cnn_dailymail", config="3.0.0", template="{article}\n\nIn short:\n{highlights}"
    ),
    "evolcodealpaca": KnownDataset(
        "theblackcat102/evol-codealpaca-v1", template="{instruction}\n\n{output}"
    ),
    "flickr30k": KnownDataset("lmms-lab/flickr30k", split="test", image=("image", "caption")),
    "gsm8k": KnownDataset("openai/gsm8k", config="main", template="{question}\n\n{answer}"),
    "open_platypus": KnownDataset(
        "garage-bAInd/Open-Platypus", template="{instruction}\n\n{input}\n\n{output}"
    ),
    "peoples_speech": KnownDataset(
        "MLCommons/peoples_speech", split="test", config="test", audio=("audio", "text")
    ),
    "perfectblend": KnownDataset(
        "mlabonne/open-perfectblend", chat=("conversations", "from", "value")
    ),
    "ultrachat_200k": KnownDataset(
        "HuggingFaceH4/ultrachat_200k",
        split="train_sft",
        suffix="_sft",
        chat=("messages", "role", "content"),
    ),
    "wikitext": KnownDataset("Salesforce/wikitext", config="wikitext-2-raw-v1"),
}
"""Short name -> the dataset."""

_ALIASES = {"flickr": "flickr30k", "ultrachat": "ultrachat_200k"}
_ROLES = {"human": "user", "gpt": "assistant"}


def known_dataset(name: str) -> KnownDataset | None:
    """Return the dataset of a short name.

    >>> known_dataset("ultrachat").hub
    'HuggingFaceH4/ultrachat_200k'
    """
    return KNOWN.get(_ALIASES.get(name, name))


def _filled(template: str, row: Mapping[str, Any]) -> str:
    """Fill in a template, paragraph by paragraph; drop those whose columns are all empty.

    >>> _filled("{question}\\n\\n{hint}\\n\\n{answer}", {"question": "2 + 2?", "answer": "4"})
    '2 + 2?\\n\\n4'
    """
    values = _Columns({name: value for name, value in row.items() if value is not None})
    paragraphs = [part.format_map(values) for part in template.split("\n\n")]
    return "\n\n".join(part for part in paragraphs if part.strip())


class _Columns(dict[str, Any]):
    """The columns of a row; a missing one is empty."""

    def __missing__(self, key: str) -> str:
        return ""


def _messages(row: Mapping[str, Any], column: str, role: str, text: str) -> list[dict[str, str]]:
    return [
        {"role": _ROLES.get(m[role], m[role]), "content": m[text]} for m in row.get(column) or ()
    ]


def _plain(messages: list[dict[str, str]]) -> str:
    return "\n\n".join(f"{m['role']}: {m['content']}" for m in messages)


def _described(captions: Any) -> list[dict[str, Any]]:
    text = captions if isinstance(captions, str) else " ".join(captions)
    question = [{"type": "image"}, {"type": "text", "text": "Describe the picture."}]
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": [{"type": "text", "text": text}]},
    ]
