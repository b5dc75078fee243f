"""The algorithms that modifiers name, one file each; the engine knows none of them by name."""

from steelyard.algorithms.algorithm import Algorithm, ModuleResult, Needs, Seen, algorithm_of
from steelyard.algorithms.block import Block
from steelyard.algorithms.gptq import GPTQ
from steelyard.algorithms.importance import GatherImportance
from steelyard.algorithms.nearest import Nearest
from steelyard.algorithms.needs import needs_data
from steelyard.algorithms.reductions import ExactSum, Largest, Smallest, Statistic
from steelyard.registry import import_all

__all__ = [
    "GPTQ",
    "Algorithm",
    "Block",
    "ExactSum",
    "GatherImportance",
    "Largest",
    "ModuleResult",
    "Nearest",
    "Needs",
    "Seen",
    "Smallest",
    "Statistic",
    "algorithm_of",
    "needs_data",
]

import_all(__name__, __path__)
