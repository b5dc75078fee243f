"""The steps of a recipe: strict option records, each naming the algorithm that carries it out."""

from steelyard.modifiers.gptq import GPTQModifier
from steelyard.modifiers.importance import IMatrixGatherer
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.nearest import QuantizationModifier

__all__ = ["GPTQModifier", "IMatrixGatherer", "Modifier", "QuantizationModifier"]
