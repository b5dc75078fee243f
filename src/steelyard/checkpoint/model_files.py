"""Decides by name which files belong to a model.

`overwrite` deletes only these, and only these are copied from a tokenizer's folder. A file whose
name is not listed belongs to the user.
"""

from __future__ import annotations

import stat
from collections.abc import Collection, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

__all__ = ["foreign_files", "is_checkpoint", "is_model_file", "is_tokenizer_file"]

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab*.json",
    "vocab.txt",
    "merges.txt",
    "bpe.codes",
    "normalizer.json",
    "*.model",  # SentencePiece
    "*.tiktoken",
    "*.spm",
    "tekken.json",
    "tokenization_*.py",
    "chat_template.json",
    "chat_template.jinja",
    "chat_templates/*.jinja",
    "additional_chat_templates/*.jinja",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "pytorch_model*.bin",
    "pytorch_model.bin.index.json",
    "consolidated*.pth",
    "*.gguf",
)
_OTHER = (
    "config.json",
    "model.sig",
    "params.json",
    "*_config.json",
    "configuration_*.py",
    "modeling_*.py",
    "processing_*.py",
    "image_processing_*.py",
    "README*",
    "LICENSE*",
    "LICENCE*",
    "NOTICE*",
    "Notice*",
    "USE_POLICY*",
    ".gitattributes",
    ".cache/huggingface/*",  # of the hub's downloader
    "recipe.yaml",  # and what else Steelyard writes
    "report.json",
    "report.html",
    "provenance.json",
    ".report.*.partial",
)


def is_tokenizer_file(relative: Path) -> bool:
    """Whether a file, relative to the tokenizer's folder, is part of a tokenizer or processor."""
    return _matches(relative, _TOKENIZER)


def is_model_file(relative: Path) -> bool:
    """Whether a file, relative to the model's folder, belongs to a model."""
    return _matches(relative, (*_TOKENIZER, *_WEIGHTS, *_OTHER))


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a configuration and weights."""
    names = [Path(path.name) for path in folder.iterdir()]
    return Path("config.json") in names and any(_matches(name, _WEIGHTS) for name in names)


def foreign_files(folder: Path, listed: Collection[Path] = ()) -> Iterator[Path]:
    """Yield files and folders that do not belong to a model, relative to the folder.

    Yields a subfolder as a whole if it cannot hold files of a model, or is another disk.

    listed: further files that belong to the model
    """
    disk = folder.lstat().st_dev
    pending = [folder]
    while pending:
        for path in sorted(pending.pop().iterdir()):
            relative, status = path.relative_to(folder), path.lstat()
            if stat.S_ISDIR(status.st_mode):
                inside = any(relative in path.parents for path in listed)
                if status.st_dev == disk and (inside or _may_hold_files(relative)):
                    pending.append(path)
                else:
                    yield relative
            elif relative not in listed and not is_model_file(relative):
                yield relative


def _may_hold_files(relative: Path) -> bool:
    """Whether a pattern names files inside this folder."""
    folders = [Path(pattern).parts[:-1] for pattern in (*_TOKENIZER, *_OTHER)]
    cached = relative.parts[:2] == (".cache", "huggingface")
    return cached or any(parts[: len(relative.parts)] == relative.parts for parts in folders)


def _matches(relative: Path, patterns: tuple[str, ...]) -> bool:
    """Whether a pattern of the same depth matches; in the hub's cache, of any depth."""
    text = relative.as_posix()
    return any(
        fnmatchcase(text, pattern)
        and (pattern.count("/") == text.count("/") or pattern.startswith(".cache/"))
        for pattern in patterns
    )
