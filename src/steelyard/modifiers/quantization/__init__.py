"""Round to nearest: observers choose the scales, and weights are rounded to them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from steelyard.modifiers.quantization.modifier import QuantizationModifier

if TYPE_CHECKING:
    from steelyard.modifiers.gptq import GPTQModifier

__all__ = ["GPTQModifier", "QuantizationModifier"]


def __getattr__(name: str) -> object:
    """Scripts for llm-compressor import `GPTQModifier` from here, and it imports this package."""
    if name != "GPTQModifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from steelyard.modifiers.gptq import GPTQModifier

    return GPTQModifier
