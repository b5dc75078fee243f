"""Modifiers of llm-compressor that are not implemented, and what to use instead."""

from __future__ import annotations

__all__ = ["NOT_IMPLEMENTED", "not_implemented"]

_PRUNED = "llm-compressor to prune, and quantize its output"

NOT_IMPLEMENTED = {
    "SparseGPTModifier": _PRUNED,
    "WandaPruningModifier": _PRUNED,
    "MagnitudePruningModifier": _PRUNED,
    "ConstantPruningModifier": _PRUNED,
    "REAPPruningModifier": _PRUNED,
}
"""Name -> what to use instead."""


def not_implemented(name: str) -> str:
    return f"{name} is not implemented yet; use {NOT_IMPLEMENTED[name]}"
