"""Modules whose inputs no static scale serves: named in the notes, or given dynamic scales.

A few tokens of some models have values a thousand times as large as all others. A range that holds
them rounds the others to zero, and a smaller one cuts them off. The observer says so
(`Observer.unserved`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.fusion import expert_groups, fused_groups
from steelyard.observers.calibration import Calibration
from steelyard.observers.steps import args_for

__all__ = ["replace_scheme", "serve_dynamically"]


def serve_dynamically(
    calibration: Calibration, choice: str, notes: list[str]
) -> dict[str, QuantizationScheme]:
    """Note the modules that no static scale serves; with "dynamic", replace their schemes.

    Returns the new schemes. Layers that the server fuses, and the experts of a layer, get one
    scheme: it looks at the first of them only.
    """
    reasons = {
        name: reason
        for name, base_name, observer in calibration.observers()
        if base_name == "input" and (reason := observer.unserved()) is not None
    }
    for name, reason in reasons.items():
        notes.append(f"{name}: no static scale serves its inputs, since {reason}; {_HELP[choice]}")
    if choice != "dynamic":
        return {}
    found = {}
    for name in _with_partners(reasons, calibration.modules):
        module: Any = calibration.modules[name]
        args = args_for(module, "input")
        if args is None or args.dynamic is not False:
            continue
        dynamic = args.model_copy(
            update={"dynamic": True, "strategy": "token", "observer": None, "observer_kwargs": {}}
        )
        found[name] = module.quantization_scheme.model_copy(update={"input_activations": dynamic})
        replace_scheme(module, found[name], "input_")
        if hasattr(module, "input_observer"):
            del module.input_observer
    return found


_HELP = {
    "note": 'uncalibratable="dynamic" lets the server compute one for each token, and a '
    "TransformModifier before it may balance the inputs",
    "dynamic": "the server computes one for each token",
}


def replace_scheme(module: Module, scheme: QuantizationScheme, *prefixes: str) -> None:
    """Give a module a scheme without the parameters that start with `prefixes`."""
    holder: Any = module
    holder.quantization_scheme = scheme
    for parameter in [name for name in module._parameters if name.startswith(prefixes)]:
        del module._parameters[parameter]


def _with_partners(names: Mapping[str, str], modules: Mapping[str, Module]) -> list[str]:
    """Return modules and those that share their scheme in the server, in the model's order."""
    found = set(names)
    for group in fused_groups(modules):
        if found.intersection(group):
            found.update(group)
    layers = expert_groups(modules)
    hit = {group.layer for group in layers if found.intersection(group.names)}
    found.update(name for group in layers if group.layer in hit for name in group.names)
    return [name for name in modules if name in found]
