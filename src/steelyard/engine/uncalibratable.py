"""Modules whose inputs no static scale serves: named in the notes, served dynamically, or left.

A few tokens of some models have values a thousand times as large as all others. A range that holds
them rounds the others to zero, and a smaller one cuts them off. The observer says so
(`Observer.unserved`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.algorithms.as_stored import per_token
from steelyard.algorithms.block import Block
from steelyard.fusion import expert_groups, fused_groups
from steelyard.observers.steps import args_for
from steelyard.plan.plan import Left, Plan

__all__ = ["leave_unquantized", "mend_unserved", "replace_scheme"]


def mend_unserved(block: Block) -> dict[str, QuantizationScheme]:
    """Note the modules that no static scale serves; replace their schemes unless by "note".

    Returns the new schemes; with "leave" they quantize nothing, and the modules leave the
    calibration. Layers that the server fuses, and the experts of a layer, get one scheme: it looks
    at the first of them only.
    """
    calibration, choice, notes = block.calibration, block.unserved, block.notes
    reasons = {
        name: reason
        for name, base_name, observer in calibration.observers()
        if base_name == "input"
        and (reason := block.dynamic.get(name) or observer.unserved()) is not None
    }
    for name, reason in reasons.items():
        notes.append(f"{name}: no static scale serves its inputs, since {reason}; {_HELP[choice]}")
    if choice == "note":
        return {}
    found = {}
    for name in _with_partners(reasons, calibration.modules):
        module: Any = calibration.modules[name]
        if choice == "leave":
            found[name] = QuantizationScheme(targets=[name])
            calibration.release(name)
            replace_scheme(module, None, "weight_", "input_", "output_")
            continue
        args = args_for(module, "input")
        if args is None or args.dynamic is not False:
            continue
        found[name] = module.quantization_scheme.model_copy(
            update={"input_activations": per_token(args)}
        )
        replace_scheme(module, found[name], "input_")
        if hasattr(module, "input_observer"):
            del module.input_observer
    return found


_HELP = {
    "note": 'uncalibratable="dynamic" lets the server compute one for each token, "leave" leaves '
    "it unquantized, and a TransformModifier before it may balance the inputs",
    "dynamic": "the server computes one for each token",
    "leave": "it is not quantized",
}


def leave_unquantized(plan: Plan, schemes: Mapping[str, QuantizationScheme]) -> None:
    """Move the modules of a plan whose schemes quantize nothing to those that are left."""
    names = {name for name, scheme in schemes.items() if scheme.weights is None}
    for planned in (p for p in plan.quantized if p.name in names):
        nbytes = planned.shape[0] * planned.shape[1] * planned.dtype.itemsize
        reason = "no static scale serves its inputs"
        plan.left.append(Left(planned.name, planned.shape, nbytes, reason))
    plan.quantized = [p for p in plan.quantized if p.name not in names]


def replace_scheme(module: Module, scheme: QuantizationScheme | None, *prefixes: str) -> None:
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
