"""Which files of a folder belong to a tokenizer or processor, by the names transformers gives."""

from __future__ import annotations

import fnmatch
from pathlib import Path

from steelyard.checkpoint.other_files import other_files

__all__ = ["tokenizer_files"]

_NAMES = (
    "tokenizer*",
    "*.tiktoken",
    "*vocab*.json",
    "vocab*.txt",
    "merges*.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "spiece.model",
    "sentencepiece*.model",
    "chat_template*",
    "additional_chat_templates/*",
    "*processor_config.json",
)


def tokenizer_files(folder: Path) -> list[Path]:
    """Return the files of a tokenizer or processor in `folder`, relative to it."""
    return [
        path
        for path in other_files(folder)
        if any(fnmatch.fnmatchcase(path.as_posix(), name) for name in _NAMES)
    ]
