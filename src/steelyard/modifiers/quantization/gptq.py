"""The path by which some of llm-compressor's users know `GPTQModifier`."""

from steelyard.modifiers.gptq import GPTQModifier

__all__ = ["GPTQModifier"]
