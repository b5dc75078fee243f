"""Resolves options before a run: the model's precision, the folder of a stage, layers to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.utils.match import is_match
from torch.nn import Module

from steelyard.engine.idle_options import refuse
from steelyard.engine.run_options import Options
from steelyard.errors import PipelineError, PlanError, nearest
from steelyard.foreign import reason_of
from steelyard.model.stacks import model_layers
from steelyard.model.untying import tied_heads, untying_problem

__all__ = ["PRECISIONS", "prepared", "target_problems", "untie_heads"]

PRECISIONS = {
    "auto": None,
    "half": torch.float16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "full": torch.float32,
    "float32": torch.float32,
    "fp32": torch.float32,
}
"""Names of types in llm-compressor."""


def prepared(options: Options) -> Options:
    """Return the options with the model in its precision and the folder of the stage."""
    options.check()
    refuse(options)
    if options.stage is not None and options.output_dir is not None:
        options = replace(options, output_dir=Path(options.output_dir) / options.stage)
    dtype = _dtype(options.precision)
    if dtype is None:
        return options
    if not isinstance(options.model, Module):
        return replace(options, model=_loaded(options, dtype))
    types = {p.dtype for p in options.model.parameters() if p.is_floating_point()}
    if types != {dtype}:
        raise PlanError(
            f"precision={options.precision!r} does not convert a loaded module; call "
            f"model.to({dtype}) first, or pass its folder"
        )
    return options


def _dtype(precision: Any) -> torch.dtype | None:
    name = str(precision).removeprefix("torch.")
    if name not in PRECISIONS:
        raise ValueError(f"precision={precision!r} is not known: {nearest(name, PRECISIONS)}")
    return PRECISIONS[name]


def _loaded(options: Options, dtype: torch.dtype) -> Any:
    """Return the model of a folder or a hub name, with its weights in a type."""
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            options.model,
            dtype=dtype,
            revision=options.model_revision or "main",
            trust_remote_code=options.trust_remote_code_model,
        )
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except Exception as error:  # many kinds: no such name, no network, foreign code
        raise PipelineError(
            f"{options.model} cannot be loaded as {options.precision} ({reason_of(error)}); load "
            "it yourself and pass the module"
        ) from error


def target_problems(options: Options, model: Any) -> Iterator[str]:
    """Yield an error for each of `sequential_targets` that names no layer, or nothing in one."""
    targets = options.sequential_targets or ()
    targets = [targets] if isinstance(targets, str) else targets
    if not targets or options.route == "basic":
        return
    try:
        layers = model_layers(model)
    except PipelineError:  # the model runs as a whole
        return
    for target in targets:
        inside = (
            is_match(f"{layer.name}.{name}".rstrip("."), module, target)
            for layer in layers
            for name, module in layer.module.named_modules()
        )
        if not any(inside):
            kinds = list(dict.fromkeys(type(layer.module).__name__ for layer in layers))
            yield (
                f"sequential_targets has {target!r}, which matches no layer of the model and "
                f"nothing in one: use {' or '.join(kinds)}, or remove it"
            )


def untie_heads(options: Options, model: Any) -> tuple[dict[str, str], list[str]]:
    """Return the heads that `tie_word_embeddings=False` unties, and why they cannot be."""
    heads = {} if options.tie_word_embeddings else tied_heads(model)
    if not heads:
        return {}, []
    problem = untying_problem(model)
    if problem is None:
        return heads, []
    return {}, [f"tie_word_embeddings=False: {problem}; remove the option"]
