"""The steps of a recipe: strict option records, each naming its algorithm."""

from steelyard.modifiers.gptq import GPTQModifier
from steelyard.modifiers.importance import IMatrixGatherer
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.nearest import QuantizationModifier
from steelyard.modifiers.not_implemented import NOT_IMPLEMENTED, not_implemented
from steelyard.registry import import_all

__all__ = ["GPTQModifier", "IMatrixGatherer", "Modifier", "QuantizationModifier"]

import_all(__name__, __path__)


def __getattr__(name: str) -> type[Modifier]:
    """Return any other modifier of this package, by the name of its class."""
    if name in Modifier.registry and Modifier.registry.get(name).__name__ == name:
        return Modifier.registry.get(name)
    if name in NOT_IMPLEMENTED:  # `from ... import name` would drop the text of an AttributeError
        raise ImportError(not_implemented(name))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
