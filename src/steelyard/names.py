"""Names and defaults that need no torch.

Completion, `--help` and the check of an option must not wait for torch. So the names of observers
and presets are read from the source files that define them: an observer registers itself in a file
of `observers/`, presets are the keys of a dictionary of compressed-tensors. Names that a plug-in
has registered in this process count too.
"""

from __future__ import annotations

import ast
import re
import sys
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

__all__ = [
    "ACTIVATIONS",
    "ACTIVATION_OBSERVER",
    "WEIGHT_OBSERVER",
    "default_observer",
    "observer_modules",
    "observer_names",
    "scheme_names",
]

WEIGHT_OBSERVER = "optimal"
"""Observer for weights unless the user names one: the least KL divergence without data."""

ACTIVATION_OBSERVER = "token_mse"
"""Observer for static activations and the KV cache unless the user names one."""

ACTIVATIONS = ("auto", "device", "host", "disk")
"""Where hidden states are kept between two layers."""

_GLOBAL_SCALE_OBSERVER = "minmax"
"""Observer for activations with a scale per group, of which only a global scale is static."""

_OWN_SCALE = ("tensor", "attn_head")  # strategies of static activations

_REGISTERED = re.compile(r"^@Observer\.register\(\"([\w-]+)\"\)", re.MULTILINE)
_PRESETS = "PRESET_SCHEMES"
_PRESETS_MODULE = "compressed_tensors.quantization.quant_scheme"
_UNQUANTIZED = "UNQUANTIZED"  # a preset that quantizes nothing


def default_observer(base_name: str, strategy: str | None = None) -> str:
    """Return the default observer for weight | input | output | q | k | v."""
    if base_name == "weight":
        return WEIGHT_OBSERVER
    return ACTIVATION_OBSERVER if strategy in (None, *_OWN_SCALE) else _GLOBAL_SCALE_OBSERVER


@lru_cache(maxsize=1)
def observer_modules() -> dict[str, tuple[str, ...]]:
    """Return the modules of `steelyard.observers` that register observers, and their names."""
    folder = Path(__file__).parent / "observers"
    found = {
        f"steelyard.observers.{path.stem}": _REGISTERED.findall(path.read_text("utf-8"))
        for path in sorted(folder.glob("*.py"))
    }
    return {module: tuple(names) for module, names in found.items() if names}


def observer_names() -> list[str]:
    """Return the observers of this package, and those registered by plug-ins so far."""
    names = {name for group in observer_modules().values() for name in group}
    base = sys.modules.get("steelyard.observers.base")
    return sorted(names if base is None else names.union(base.Observer.registered_names()))


def scheme_names() -> list[str]:
    """Return the presets of the installed compressed-tensors, and those added so far."""
    module = sys.modules.get(_PRESETS_MODULE)
    names = _presets_in_source() if module is None else getattr(module, _PRESETS)
    return sorted({*names} - {_UNQUANTIZED})


@lru_cache(maxsize=1)
def _presets_in_source() -> tuple[str, ...]:
    """Read the preset names from their source file: importing it would import torch."""
    spec = find_spec("compressed_tensors")  # imports nothing
    assert spec is not None and spec.origin is not None
    path = Path(spec.origin).parent.joinpath("quantization", "quant_scheme.py")
    for node in ast.parse(path.read_text("utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if getattr(targets[0], "id", None) == _PRESETS and isinstance(value, ast.Dict):
            keys = [getattr(key, "value", None) for key in value.keys]
            if all(isinstance(key, str) for key in keys):
                return tuple(map(str, keys))
    from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES  # the source differs

    return tuple(PRESET_SCHEMES)
