"""`save_pretrained` of a quantized module, with the options that llm-compressor's scripts give.

    oneshot(model, recipe)
    model.save_pretrained("model-W4A16", save_compressed=True)

The folder is replaced as a whole, once the new checkpoint is complete.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme

from steelyard.engine.output import Output
from steelyard.engine.rewriting import add_matrices
from steelyard.errors import CheckpointError, StrategyError
from steelyard.formats import DENSE, format_named, format_of
from steelyard.model.source import Source
from steelyard.plan.plan import Plan

__all__ = ["save_as_quantized"]

# Options of transformers and llm-compressor that change nothing at these values.
_IDLE: dict[str, tuple[Any, ...]] = {
    "safe_serialization": (None, True),
    "sparsity_config": (None,),
    "skip_sparsity_compression_stats": (None, True),
    "disable_sparse_compression": (None, False, True),
    "push_to_hub": (None, False),
    "state_dict": (None,),
    "variant": (None,),
    "token": (None,),
    "save_peft_format": (None, True),
    "save_original_format": (None, True),
}
_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def save_as_quantized(
    source: Source,
    config: QuantizationConfig,
    recipe: str,
    modules: Mapping[str, Any],
    plan: Plan,
    tokenizer: Any,
    add_files: Callable[[Path], None] | None = None,
    first: bool = True,
) -> None:
    """Make the module's own `save_pretrained` write its quantized checkpoint.

    first: whether this is the first rank; the others hold the same model and write nothing
    """

    def save_pretrained(
        save_directory: str | Path,
        *,
        save_compressed: bool = True,
        quantization_format: str | None = None,
        max_shard_size: int | str = "5GB",
        overwrite: bool = True,
        is_main_process: bool = True,
        **options: Any,
    ) -> None:
        """Write the quantized model.

        save_compressed:     False writes rounded weights in their original type, as an ordinary
                             model without a quantization_config
        quantization_format: a format of compressed-tensors, instead of the scheme's own
        max_shard_size:      largest shard, in bytes or such as "5GB"
        overwrite:           replace a checkpoint in the folder
        is_main_process:     False writes nothing
        """
        shard_bytes = _shard_bytes(max_shard_size)
        chosen = _chosen_format(config, quantization_format, save_compressed)
        if chosen == DENSE and plan.served:
            raise CheckpointError(
                f"save_compressed=False cannot store rotation {plan.served[0].group}, which a "
                "server applies; save it compressed"
            )
        if not (is_main_process and first):
            return
        _warn_of_idle(options)
        if chosen == DENSE and (lost := _lost_when_dense(config)):
            warnings.warn(
                f"save_compressed=False stores weights alone, so in {save_directory} {lost} are "
                "not quantized; save it compressed to keep their scales",
                stacklevel=2,
            )
        with Output.open(
            source,
            save_directory,
            overwrite,
            tokenizer,
            max_shard_bytes=shard_bytes,
            format=chosen,
            keep_tokenizer=True,
        ) as output:
            output.add(source.model, "", None)
            add_matrices(output, plan)
            output.finish(config, recipe, modules, plan, add_files=add_files or bool)

    source.model.save_pretrained = save_pretrained


def _chosen_format(config: QuantizationConfig, name: str | None, compressed: bool) -> str | None:
    """Return the format to write, None for that of each scheme; raise if it does not fit."""
    if name is not None:
        name = str(getattr(name, "value", name))
    if not compressed:
        if name not in (None, DENSE):
            raise CheckpointError(
                f"quantization_format={name!r} needs save_compressed=True; remove one of the two"
            )
        return DENSE
    if name is None or name == DENSE:
        return name
    try:
        format_named(name)
    except StrategyError as error:
        raise CheckpointError(f"quantization_format: {error}") from None
    for group, scheme in config.config_groups.items():
        if scheme.weights is not None and not _fits(name, scheme):
            raise CheckpointError(
                f"quantization_format={name!r} cannot store the weights of {group}; "
                f"remove the option to use {format_of(scheme)!r}"
            )
    return name


def _fits(name: str, scheme: QuantizationScheme) -> bool:
    """Whether a server decodes the weights of a scheme from this format."""
    weights = scheme.weights
    assert weights is not None
    if name == format_of(scheme):
        return True
    # the other formats have one byte per float code, and no second or power-of-two scale
    plain = weights.type == "int" or (weights.num_bits == 8 and weights.scale_dtype is None)
    # packing holds weights alone: vLLM reads W4AFP8 packed, which compressed-tensors never infers
    format = format_named(name)
    packs = format.is_packed and format.scale_dtype is None and weights.type == "int"
    takes = format.compressor.can_compress(torch.nn.Linear, scheme)
    return plain and (packs or bool(takes))


def _lost_when_dense(config: QuantizationConfig) -> str:
    """Return the quantized parts that a checkpoint of weights alone loses."""
    schemes = config.config_groups.values()
    lost = {
        "activations": any(s.input_activations or s.output_activations for s in schemes),
        "the KV cache": config.kv_cache_scheme is not None,
    }
    return " and ".join(name for name, there in lost.items() if there)


def _shard_bytes(size: int | str) -> int:
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?I?B?)\s*", str(size).upper())
    nbytes = int(float(match[1]) * _UNITS.get(match[2], 0)) if match else 0
    if nbytes < 1:
        raise CheckpointError(
            f"max_shard_size={size!r} is not a size; give a number of bytes, or such as '5GB'"
        )
    return nbytes


def _warn_of_idle(options: Mapping[str, Any]) -> None:
    idle = [n for n, value in options.items() if not any(value is v for v in _IDLE.get(n, ()))]
    if idle:
        given = ", ".join(f"{name}={options[name]!r:.40}" for name in idle)
        warnings.warn(
            f"save_pretrained of a quantized model ignores {given}: it writes safetensors files "
            "to a folder, with all weights of the model",
            stacklevel=3,
        )
