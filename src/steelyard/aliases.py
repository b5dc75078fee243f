"""Import paths of llm-compressor, as aliases of the modules here.

`import steelyard.modifiers.quantization` returns `steelyard.modifiers` itself, so each class exists
once. An alias imports nothing before it is used.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

__all__ = ["ALIASES", "install"]

ALIASES = {
    "steelyard.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.base": "steelyard.modifiers.modifier",
    # what `from steelyard.modifiers.quantization import calibration` looks for
    "steelyard.modifiers.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.imatrix": "steelyard.modifiers.importance",
    "steelyard.modifiers.logarithmic_equalization": "steelyard.modifiers.smoothing",
    "steelyard.modifiers.quantization": "steelyard.modifiers",
    "steelyard.modifiers.quantization.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.quantization.gptq": "steelyard.modifiers.gptq",
    "steelyard.modifiers.smoothquant": "steelyard.modifiers.smoothing",
    "steelyard.modifiers.transform": "steelyard.modifiers",
    "steelyard.modifiers.transform.awq": "steelyard.modifiers.awq",
    "steelyard.modifiers.transform.imatrix": "steelyard.modifiers.importance",
    "steelyard.modifiers.transform.smoothquant": "steelyard.modifiers.smoothing",
}
"""Alias -> module."""


class _Aliases(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self) if name in ALIASES else None

    def exec_module(self, module: ModuleType) -> None:
        # the import system returns this entry after the call
        sys.modules[module.__name__] = import_module(ALIASES[module.__name__])


def install() -> None:
    """Make the aliases importable; a second call changes nothing."""
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())  # before the file finders, which know other paths
