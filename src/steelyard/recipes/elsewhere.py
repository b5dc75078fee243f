"""Modifiers of llm-compressor that are not implemented here, and what serves instead."""

from __future__ import annotations

__all__ = ["ELSEWHERE", "not_here"]

_SCALED = "GPTQModifier, or QuantizationModifier with the observer optimal and an IMatrixGatherer"
_ROTATED = "GPTQModifier, or run llm-compressor first and quantize what it saves"
_PRUNED = "llm-compressor to prune, and quantize what it saves"

ELSEWHERE = {
    "AWQModifier": _SCALED,
    "SmoothQuantModifier": _SCALED,
    "LogarithmicEqualizationModifier": _SCALED,
    "AutoRoundModifier": "GPTQModifier",
    "SpinQuantModifier": _ROTATED,
    "QuIPModifier": _ROTATED,
    "SparseGPTModifier": _PRUNED,
    "WandaPruningModifier": _PRUNED,
    "MagnitudePruningModifier": _PRUNED,
    "ConstantPruningModifier": _PRUNED,
}
"""Name -> what to use."""


def not_here(name: str) -> str:
    return f"{name} is not implemented yet; use {ELSEWHERE[name]}"
