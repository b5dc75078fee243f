"""Resolves options before a run: the model's precision, the folder of a stage, layers to run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
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
from steelyard.model.placement import Placement, placement_of
from steelyard.model.source import Source
from steelyard.model.stacks import model_layers
from steelyard.model.untying import tied_heads, untying_problem
from steelyard.modifiers import Modifier

__all__ = ["PRECISIONS", "open_source", "prepared", "target_problems", "untie_heads"]

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


_OF_LLM_COMPRESSOR = ("ExpertMLP",)  # its class of a single expert, within a layer here


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
        device = placement_of(options.device, options.model).device
        loaded = _loaded(options, dtype)
        return replace(options, model=loaded if options.device == "auto" else loaded.to(device))
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


def open_source(options: Options, streamed: bool, placement: Placement) -> Source:
    """Open the model of a run: its files alone for a stream, else placed on its device."""
    if streamed:
        files = Source.from_files(options.model, options.model_revision)
        files.place(placement)
        return files
    source = Source.open(options.model, options.model_revision, options.trust_remote_code_model)
    source.place(placement)
    if options.precision != "auto":
        source.loaded_from = None  # its tensors would be stored in the type of the files
    return source


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
        if target in _OF_LLM_COMPRESSOR:
            continue
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


def untie_heads(
    options: Options, modifiers: Sequence[Modifier], model: Any
) -> tuple[dict[str, str], list[str]]:
    """Return the heads that an option or a modifier unties, and why they cannot be."""
    asking = [type(modifier).__name__ for modifier in modifiers if modifier.unties_heads]
    given = not options.tie_word_embeddings
    heads = tied_heads(model) if given or asking else {}
    if not heads:
        return {}, []
    problem = untying_problem(model)
    if problem is None:
        return heads, []
    if given:
        return {}, [f"tie_word_embeddings=False: {problem}; remove the option"]
    head, embedding = next(iter(heads.items()))
    return {}, [
        f"{asking[0]} needs {head} to have a weight of its own, but it shares that of {embedding}, "
        f"and {problem}"
    ]
