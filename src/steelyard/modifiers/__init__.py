"""What a recipe is made of: each modifier says what to do to which modules, and with what."""

from steelyard.modifiers.base import Modifier
from steelyard.modifiers.gptq import GPTQModifier
from steelyard.modifiers.imatrix import IMatrixGatherer
from steelyard.modifiers.quantization import QuantizationModifier

__all__ = ["GPTQModifier", "IMatrixGatherer", "Modifier", "QuantizationModifier"]
