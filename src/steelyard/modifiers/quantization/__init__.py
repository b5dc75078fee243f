"""Round to nearest: observers choose the scales, and weights are rounded to them."""

from steelyard.modifiers.quantization.modifier import QuantizationModifier

__all__ = ["QuantizationModifier"]
