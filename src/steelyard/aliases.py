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
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["ALIASES", "FORWARDED", "MISSING", "install"]

ALIASES = {
    "steelyard.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.base": "steelyard.modifiers.modifier",
    # what `from steelyard.modifiers.quantization import calibration` looks for
    "steelyard.modifiers.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.imatrix": "steelyard.modifiers.importance",
    "steelyard.modifiers.quantization": "steelyard.modifiers",
    "steelyard.modifiers.quantization.calibration": "steelyard.observers.calibration",
    "steelyard.modifiers.quantization.gptq": "steelyard.modifiers.gptq",
    "steelyard.modifiers.transform": "steelyard.modifiers",
    "steelyard.modifiers.transform.imatrix": "steelyard.modifiers.importance",
}
"""Alias -> module."""

_OF_MODIFIERS = (
    *("obcq", "pruning", "pruning.constant", "pruning.magnitude", "pruning.sparsegpt"),
    *("pruning.wanda", "quantization.quantization"),
    "transform.quip",
)
_OF_SMOOTHING = (
    *("smoothquant", "smoothquant.base", "logarithmic_equalization"),
    *("logarithmic_equalization.base", "transform.smoothquant", "transform.smoothquant.base"),
)
_OF_AWQ = ("transform.awq", "transform.awq.base", "transform.awq.mappings")
_OF_SPINQUANT = (
    *("transform.spinquant", "transform.spinquant.base", "transform.spinquant.mappings"),
    "transform.spinquant.norm_mappings",
)
FORWARDED = {
    "steelyard.core": "steelyard.sessions",
    "steelyard.core.events": "steelyard.sessions",
    "steelyard.core.session": "steelyard.sessions",
    "steelyard.core.session_functions": "steelyard.sessions",
    "steelyard.core.state": "steelyard.sessions",
    "steelyard.args": "steelyard.script_tools",
    "steelyard.datasets": "steelyard.script_tools",
    "steelyard.datasets.utils": "steelyard.script_tools",
    "steelyard.entrypoints": "steelyard.entry",
    "steelyard.entrypoints.model_free": "steelyard.entry",
    "steelyard.entrypoints.oneshot": "steelyard.entry",
    "steelyard.logger": "steelyard.logs",
    "steelyard.modeling": "steelyard.script_tools",
    "steelyard.modeling.deepseekv32": "steelyard.script_tools",
    "steelyard.modeling.deepseekv32.model": "steelyard.script_tools",
    "steelyard.modeling.moe": "steelyard.script_tools",
    "steelyard.modeling.moe.context": "steelyard.script_tools",
    "steelyard.modeling.moe.linearize": "steelyard.script_tools",
    "steelyard.modeling.prepare": "steelyard.script_tools",
    "steelyard.modifiers.autoround.utils": "steelyard.script_tools",
    "steelyard.recipe": "steelyard.recipes",
    "steelyard.recipe.recipe": "steelyard.recipes",
    "steelyard.transformers": "steelyard.script_tools",
    "steelyard.transformers.data": "steelyard.script_tools",
    "steelyard.transformers.tracing": "steelyard.script_tools",
    "steelyard.utils": "steelyard.script_tools",
    "steelyard.utils.dev": "steelyard.script_tools",
    "steelyard.utils.transformers": "steelyard.script_tools",
    **{f"steelyard.modifiers.{name}": "steelyard.modifiers" for name in _OF_MODIFIERS},
    **{f"steelyard.modifiers.{n}": "steelyard.modifiers.smoothing" for n in _OF_SMOOTHING},
    **{f"steelyard.modifiers.{n}": "steelyard.modifiers.awq" for n in _OF_AWQ},
    **{f"steelyard.modifiers.{n}": "steelyard.modifiers.spinquant" for n in _OF_SPINQUANT},
}
"""Path -> module that has its names; a module of its own, so that it may have parts."""

MISSING = {
    "steelyard.modeling": "the model classes of transformers are used as they are",
    "steelyard.modifiers": "`steelyard.modifiers` holds all modifiers",
    "steelyard.observers": "`steelyard.observers` holds all observers",
    "steelyard.pipelines": "a run has no pipeline objects: pass pipeline= to oneshot",
    "steelyard.pytorch": "the package has no such tools; use torch and compressed-tensors",
    "steelyard.sentinel": "the package has no such value",
    "steelyard.transformers": "use transformers itself, and steelyard.oneshot",
    "steelyard.typing": "the package has no such types; annotate with those of transformers",
    "steelyard.utils": "the package has no such tools; use torch and compressed-tensors",
}
"""Package of llm-compressor -> what to use instead of those parts that are not aliases."""


def _is_file(name: str) -> bool:
    """Whether a module has a file of its own, which comes before an alias."""
    place = Path(__file__).parent.joinpath(*name.split(".")[1:])
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


class _Aliases(MetaPathFinder, Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if (name in ALIASES or name in FORWARDED) and not _is_file(name):
            return ModuleSpec(name, self)
        package = next((p for p in MISSING if name == p or name.startswith(f"{p}.")), None)
        if package is None or _is_file(name):
            return None
        raise ModuleNotFoundError(f"there is no {name}: {MISSING[package]}", name=name)

    def exec_module(self, module: ModuleType) -> None:
        # the import system returns this entry after the call
        name = module.__name__
        if name in ALIASES:
            sys.modules[name] = import_module(ALIASES[name])
        else:
            sys.modules[name] = _Forwarding(name, FORWARDED[name])


class _Forwarding(ModuleType):
    """A module that has the names of another one."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"Names of llm-compressor's path; see `{target}`.")
        self.__dict__.update(_target=target, __path__=[])  # a package, which may have parts

    def __getattr__(self, name: str) -> Any:
        return getattr(import_module(self._target), name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Keep `entrypoints.oneshot` the function when a part of that name is imported."""
        if not (isinstance(value, ModuleType) and hasattr(import_module(self._target), name)):
            super().__setattr__(name, value)


def install() -> None:
    """Make the aliases importable; a second call changes nothing."""
    if not any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Aliases())  # before the file finders, which know other paths
