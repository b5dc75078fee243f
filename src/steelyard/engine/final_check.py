"""Validates a written checkpoint before it is moved into place."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig

from steelyard.checkpoint import Shards, validate_checkpoint
from steelyard.errors import CheckpointInvalid
from steelyard.fusion import fused_groups
from steelyard.model.class_loading import loading_problems
from steelyard.model.source import Source
from steelyard.plan.plan import Plan

__all__ = ["check_written"]


def check_written(
    folder: Path,
    content: Mapping[str, Any],
    source: Source,
    config: QuantizationConfig,
    plan: Plan,
    modules: Mapping[str, Any],
    changed: Collection[str],
    as_planned: bool,
) -> None:
    """Raise if the checkpoint in `folder` is not fit to serve.

    content:    content of config.json
    modules:    results of each module
    changed:    tensors that the run changed, by their names in the files
    as_planned: whether the plan was made for this format and config
    """
    reported = {
        source.module_key(name): m.error for name, m in modules.items() if m.error is not None
    }
    problems = validate_checkpoint(
        folder,
        source=source.shards,
        reported=reported,
        samples=min(8, 2 + len(reported) // 32),  # cheap compared with the run
        fused=_fused(source, plan),
        allow_negative=_negative(config),
        changed=changed,
        dtypes={source.module_key(p.name): p.dtype for p in plan.quantized},
    )
    unexpected = _unexpected(folder, content, plan)
    if as_planned:
        problems += unexpected
    elif unexpected:  # planned for another format, or before modules turned out to get no tokens
        warnings.warn("; ".join(unexpected), stacklevel=2)
    if problems:
        listed = "\n".join(f"  - {problem}" for problem in problems)
        raise CheckpointInvalid(
            f"the checkpoint written to {folder} is invalid:\n{listed}\n"
            "It was not moved into place; start anew with resume=False."
        )


def _unexpected(folder: Path, content: Mapping[str, Any], plan: Plan) -> list[str]:
    """Return problems of loading the checkpoint in transformers that the plan did not report."""
    with Shards(folder) as written:
        specs = {name: (written.info(name).dtype, written.info(name).shape) for name in written}
    return [each for each in loading_problems(content, specs) if each not in plan.warnings]


def _negative(config: QuantizationConfig) -> bool:
    weights = [s.weights for s in config.config_groups.values() if s.weights is not None]
    return any((args.observer_kwargs or {}).get("negative_scales") for args in weights)


def _fused(source: Source, plan: Plan) -> list[tuple[str, ...]]:
    """Return the groups of modules that the server fuses, by their names in the source."""
    return [
        tuple(source.module_key(name) for name in group)
        for group in fused_groups(p.name for p in plan.quantized)
    ]
