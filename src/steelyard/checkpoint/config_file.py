"""Reads the config.json of a checkpoint, as untrusted input, and writes it."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import compressed_tensors
import torch
from compressed_tensors.base import (
    COMPRESSION_VERSION_NAME,
    QUANTIZATION_METHOD,
    QUANTIZATION_METHOD_NAME,
    SPARSITY_CONFIG_NAME,
    TRANSFORM_CONFIG_NAME,
)
from compressed_tensors.quantization import QuantizationConfig

from steelyard.checkpoint.patterns import problem_of, slow_pattern
from steelyard.checkpoint.untrusted_files import read_json
from steelyard.errors import CheckpointError
from steelyard.foreign import reason_of, show

__all__ = [
    "CONFIG",
    "check_patterns",
    "named_dtype",
    "quantization_config_dict",
    "read_config",
    "read_quantization",
    "text_config",
    "untied_config",
    "write_config",
]

CONFIG = "config.json"


def read_config(folder: Path) -> dict[str, Any]:
    """Return the settings in config.json; `quantization_config` is an object or absent."""
    path = folder / CONFIG
    try:
        config = read_json(path, unique=False)  # of two equal keys, transformers uses the last
    except ValueError as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(
            f"{path} cannot be read ({reason_of(error)}); every model has one: download it again"
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not an object but {show(config)}; download it again")
    kind = config.get("model_type")
    if kind is not None and not isinstance(kind, str):
        raise CheckpointError(f"{path} has model_type {show(kind)}, which is not a model type")
    quantization = config.get("quantization_config")
    if quantization is None:
        config.pop("quantization_config", None)
    elif not isinstance(quantization, dict):
        raise CheckpointError(
            f"{path} has quantization_config {show(quantization)}, which is not an object; "
            "download it again, or remove it if the weights are not quantized"
        )
    text = config.get("text_config")
    if text is not None and not isinstance(text, dict):
        raise CheckpointError(
            f"{path} has text_config {show(text)}, which is not an object; download it again"
        )
    return config


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return the part of the settings that describes the language model."""
    inner = config.get("text_config")
    return inner if isinstance(inner, dict) else config


def untied_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings whose output head is not tied to the embedding.

    transformers reads `tie_word_embeddings` of the whole model, vLLM that of the language model.
    """
    untied: dict[str, Any] = {**config, "tie_word_embeddings": False}
    if isinstance(config.get("text_config"), dict):
        untied["text_config"] = {**config["text_config"], "tie_word_embeddings": False}
    return untied


def named_dtype(config: Mapping[str, Any]) -> torch.dtype | None:
    """Return the type of the weights that the settings name; None where they name none."""
    named = config.get("dtype") or config.get("torch_dtype")
    dtype = getattr(torch, str(named).removeprefix("torch."), None)
    return dtype if isinstance(dtype, torch.dtype) else None


def read_quantization(folder: Path) -> tuple[dict[str, Any], QuantizationConfig]:
    """Return the settings in config.json, and those of compressed-tensors in it."""
    start = f"{folder / CONFIG} has no usable quantization_config"
    try:
        config = read_config(folder)
    except CheckpointError as error:
        raise CheckpointError(f"{start}: {error}") from error
    if "quantization_config" not in config:
        raise CheckpointError(f"{start}: it has none, so the model is not quantized")
    try:
        return config, QuantizationConfig.model_validate(config["quantization_config"])
    except Exception as error:  # its validators may raise anything for a value of a wrong type
        raise CheckpointError(f"{start}: {reason_of(error)}") from error


def check_patterns(folder: Path, config: QuantizationConfig, names: Collection[str]) -> None:
    """Refuse an invalid or too slow regular expression in the quantization_config."""
    targets = [t for scheme in config.config_groups.values() for t in scheme.targets]
    patterns = [*targets, *(config.ignore or ())]
    problem = next(filter(None, map(problem_of, patterns)), None)
    problem = problem or slow_pattern(patterns, names)
    if problem is not None:
        raise CheckpointError(f"{folder / CONFIG} has no usable quantization_config: {problem}")


def quantization_config_dict(config: QuantizationConfig) -> dict[str, Any]:
    """Return the value of "quantization_config" in config.json, in JSON's types."""
    content = {
        COMPRESSION_VERSION_NAME: compressed_tensors.__version__,
        QUANTIZATION_METHOD_NAME: QUANTIZATION_METHOD,
        SPARSITY_CONFIG_NAME: {},
        TRANSFORM_CONFIG_NAME: {},
        **config.model_dump(exclude={"quant_method"}),
    }
    plain: dict[str, Any] = json.loads(json.dumps(content))
    return plain


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the settings of a checkpoint."""
    text = json.dumps(_ordered(config), indent=2) + "\n"
    (folder / CONFIG).write_text(text, "utf-8")


def _ordered(value: Any, key: str = "") -> Any:
    """Return JSON values with sorted keys; config groups keep their order.

    compressed-tensors matches targets in that order, and logs those that an earlier `Linear` hides.
    """
    if isinstance(value, dict):
        keys = value if key == "config_groups" else sorted(value)
        return {each: _ordered(value[each], each) for each in keys}
    return [_ordered(each) for each in value] if isinstance(value, list) else value
