"""Loads the tokenizer or the processor of a model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.checkpoint.other_files import check_kinds
from steelyard.errors import DataError
from steelyard.foreign import reason_of
from steelyard.model.source import Source

__all__ = ["checked_tokenizer", "processor_of", "tokenizer_of"]

_FILES = ["*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja"]


def checked_tokenizer(given: Any, source: Source, trust_remote_code: bool = False) -> Any:
    """Return the given tokenizer, or its folder after a test load.

    given: an object, a folder, or a name on the hub, which is downloaded; None stays None
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
                f"the tokenizer {str(given)!r} is not a folder, and it cannot be downloaded from "
                f"the hub ({reason_of(error)}); pass tokenizer= with a folder"
            ) from None
    tokenizer_of(folder, source, trust_remote_code)
    return folder


def tokenizer_of(given: Any, source: Source, trust_remote_code: bool = False) -> Any:
    """Return the given tokenizer object, or load it from the given folder, else from the model's.

    trust_remote_code: run code that ships with the folder
    """
    from transformers import AutoTokenizer

    if given is not None and not isinstance(given, (str, Path)):
        return given
    folder = given or (source.shards.folder if source.shards is not None else None)
    folder = folder or getattr(source.model, "name_or_path", "") or None
    if folder is None:
        raise DataError("the dataset holds text, but the model has no tokenizer: pass tokenizer=")
    check_kinds(Path(folder))
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # malformed files raise anything, and tokenizers panics
        if not trust_remote_code and "custom code" in str(error):
            raise DataError(
                f"the tokenizer of {folder} is custom code, which runs only if you allow it; pass "
                "tokenizer=, or token ids as the dataset, or "
                "trust_remote_code_model=True if you trust it"
            ) from None
        raise DataError(
            f"the tokenizer of {folder} cannot be loaded ({reason_of(error)}); pass "
            "tokenizer=, or token ids as the dataset"
        ) from None


def processor_of(given: Any, source: Source, trust_remote_code: bool = False) -> Any:
    """Return the given processor object, or load it from the given folder, else from the model's.

    trust_remote_code: run code that ships with the folder
    """
    from transformers import AutoProcessor

    if given is not None and not isinstance(given, (str, Path)):
        if getattr(given, "image_processor", getattr(given, "feature_extractor", None)) is None:
            raise DataError(
                f"the data holds images or audio, and a {type(given).__name__} processes only "
                "text: pass processor="
            )
        return given
    folder = given or source.origin
    if folder is None:
        raise DataError(
            "the data holds images or audio, and the model has no files: pass processor="
        )
    check_kinds(Path(folder))
    try:
        return AutoProcessor.from_pretrained(  # type: ignore[no-untyped-call]
            folder, trust_remote_code=trust_remote_code
        )
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # malformed files raise anything, and tokenizers panics
        raise DataError(
            f"the data holds images or audio, and the processor of {folder} cannot be loaded "
            f"({reason_of(error)}); pass processor=, or samples with the model's inputs"
        ) from None
