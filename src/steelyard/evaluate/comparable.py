"""Checks, before any work, that two models can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from steelyard.checkpoint.untrusted_files import read_json
from steelyard.errors import PipelineError
from steelyard.foreign import reason_of
from steelyard.model.layerwise import LayerwiseModel

__all__ = ["check_pair", "check_tokenizers"]

_FILES = ("tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


def check_pair(base: LayerwiseModel, quantized: LayerwiseModel) -> None:
    """Raise a PipelineError if the models differ in layers or vocabulary size, or are sequence to
    sequence.
    """
    for model in (base, quantized):
        if getattr(model.source.model.config, "is_encoder_decoder", False):
            raise PipelineError(
                f"{model.label} cannot be evaluated: {type(model.source.model).__name__} is an "
                "encoder-decoder model, and only models that predict the next token of their input "
                "are compared; score both on their task instead"
            )
    layers = [len(model.sequence.layers) for model in (base, quantized)]
    if layers[0] != layers[1]:
        raise PipelineError(
            f"{base.label} has {layers[0]} layers, {quantized.label} has {layers[1]}; pass the "
            "model that was quantized"
        )
    if base.vocab_size != quantized.vocab_size:
        raise PipelineError(
            f"{base.label} has a vocabulary of {base.vocab_size} tokens, {quantized.label} of "
            f"{quantized.vocab_size}; pass the model that was quantized"
        )


def check_tokenizers(base: Path, quantized: Path) -> None:
    """Raise a PipelineError if both folders have a tokenizer and the token ids differ.

    tokenizer.json is compared by its vocabulary, since versions of transformers write the rest
    differently. Other files are compared byte by byte.
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
            f"{base / name} and {quantized / name} have different token ids, so the two models "
            "cannot be compared; pass the model that was quantized, or copy its tokenizer to the "
            "quantized one"
        )


def _has_both(base: Path, quantized: Path, name: str) -> bool:
    return (base / name).is_file() and (quantized / name).is_file()


def _vocabulary(folder: Path) -> Any:
    """Return the vocabulary and the added tokens, with their ids."""
    path = folder / "tokenizer.json"
    try:
        content = read_json(path, unique=False)
        added = {token["content"]: token["id"] for token in content.get("added_tokens") or ()}
        return content["model"]["vocab"], added
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise PipelineError(
            f"{path} cannot be read ({reason_of(error)}); download it again"
        ) from error
