"""What two models must have in common to be compared; told before any work is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.checkpoint.header import read_json
from steelyard.errors import PipelineError
from steelyard.evaluate.walking import Walk
from steelyard.foreign import reason_of

__all__ = ["check_pair", "check_tokenizers"]

_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def check_pair(base: Walk, quantized: Walk) -> None:
    """Raise a PipelineError unless the quantized model can have been made from the base."""
    layers = [len(walk.sequence.layers) for walk in (base, quantized)]
    if layers[0] != layers[1]:
        raise PipelineError(
            f"{base.called} has {layers[0]} layers, {quantized.called} has {layers[1]}; give the "
            "model that the quantized one was made from"
        )
    if base.vocab_size != quantized.vocab_size:
        raise PipelineError(
            f"{base.called} knows {base.vocab_size} tokens, {quantized.called} knows "
            f"{quantized.vocab_size}; give the model that the quantized one was made from"
        )


def check_tokenizers(base: Path, quantized: Path) -> None:
    """Raise a PipelineError where both folders have a tokenizer, and they number tokens otherwise.

    tokenizer.json is compared by its vocabulary: versions of transformers write the rest
    differently. Files of other kinds are compared byte by byte.
    """
    if _has_both(base, quantized, "tokenizer.json"):
        differ = _vocabulary(base) != _vocabulary(quantized)
        name = "tokenizer.json"
    else:
        both = [name for name in _FILES if _has_both(base, quantized, name)]
        name = next(
            (n for n in both if (base / n).read_bytes() != (quantized / n).read_bytes()), ""
        )
        differ = bool(name)
    if differ:
        raise PipelineError(
            f"{base / name} and {quantized / name} number tokens differently, so the two models "
            "cannot be compared; give the model that the quantized one was made from, or put its "
            "tokenizer beside it"
        )


def _has_both(base: Path, quantized: Path, name: str) -> bool:
    return (base / name).is_file() and (quantized / name).is_file()


def _vocabulary(folder: Path) -> Any:
    """Return what is numbered, and what it is numbered with."""
    path = folder / "tokenizer.json"
    try:
        content = read_json(path, unique=False)
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return content["model"]["vocab"], added
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(
            f"{path} cannot be read ({reason_of(error)}); download it again"
        ) from error
