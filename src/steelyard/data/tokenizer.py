"""The tokenizer that belongs to a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.checkpoint.other_files import check_kinds
from steelyard.errors import DataError
from steelyard.foreign import reason_of
from steelyard.model.source import Source

__all__ = ["checked_tokenizer", "tokenizer_of"]

_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja"]


def checked_tokenizer(given: Any, source: Source, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that was given, or the folder of one that loads.

    given: an object, a folder, or a name on the hub, which is fetched; None stays None
    """
    if given is None or not isinstance(given, (str, Path)):
        return given
    folder = Path(given).expanduser()
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(str(given), allow_patterns=_FILES))
        except Exception as error:
            raise DataError(
                f"the tokenizer {str(given)!r} is neither a folder here nor one that could be "
                f"fetched ({reason_of(error)}); pass tokenizer= with the folder of one"
            ) from None
    tokenizer_of(folder, source, trust_remote_code)
    return folder


def tokenizer_of(given: Any, source: Source, trust_remote_code: bool = False) -> Any:
    """Return the tokenizer that was given, or loaded from where it says, or from the model.

    trust_remote_code: run code that the folder brings; without it transformers would ask on stdin
    """
    from transformers import AutoTokenizer

    if given is not None and not isinstance(given, (str, Path)):
        return given
    folder = given or (source.shards.folder if source.shards is not None else None)
    folder = folder or getattr(source.model, "name_or_path", "") or None
    if folder is None:
        raise DataError("text must be tokenized, and the model came without: pass tokenizer=")
    check_kinds(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # any kind: files of wrong types, and panics of tokenizers
        if not trust_remote_code and "custom code" in str(error):
            raise DataError(
                f"the tokenizer of {folder} is code that comes with the model, which is not run "
                "unless you ask for it; pass tokenizer=, or token ids as the dataset, or "
                "trust_remote_code_model=True if you trust it"
            ) from None
        raise DataError(
            f"{folder} has no tokenizer that loads ({reason_of(error)}); pass "
            "tokenizer=, or token ids as the dataset"
        ) from None
