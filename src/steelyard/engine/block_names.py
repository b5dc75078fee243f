"""Output errors in the results of modules: their names, and those of blocks."""

from __future__ import annotations

from collections.abc import Mapping

from steelyard.algorithms import ModuleResult

__all__ = ["BLOCK_ERROR", "OUTPUT_ERROR", "block_errors", "block_of"]

OUTPUT_ERROR, BLOCK_ERROR = "output_error", "block_error"
"""Names in the details of a module's result; all modules of a block have the block's error."""


def block_of(name: str) -> str:
    """Return the layer that a module is in.

    >>> block_of("model.layers.3.mlp.experts.7.up_proj")
    'model.layers.3'
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), len(parts))
    return ".".join(parts[: at + 1])


def block_errors(modules: Mapping[str, ModuleResult]) -> dict[str, float]:
    """Return the output error of each block that has one, in the order of the model."""
    return {
        block_of(name): module.details[BLOCK_ERROR]
        for name, module in modules.items()
        if module.details.get(BLOCK_ERROR) is not None
    }
