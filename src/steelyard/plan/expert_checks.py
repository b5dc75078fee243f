"""Finds recipes for experts that no server can load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.nn import Linear, Module

from steelyard.fusion import expert_groups

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

__all__ = ["expert_problems"]

_WITHOUT_INPUT_GLOBAL_SCALE = ("granitemoehybrid",)
"""Model types whose class in vLLM 0.32 has no place for `input_global_scale` of experts."""


def expert_problems(model: Any, modules: Mapping[str, Module], plan: Plan) -> Iterator[str]:
    """Yield an error for each layer whose experts vLLM cannot read: a bias, different schemes.

    vLLM stacks the experts of a layer and applies the scheme of the first to all. It supports a
    bias only in the MXFP4 of gpt-oss, which is not a format of compressed-tensors.
    """
    groups = {planned.name: planned.group for planned in plan.quantized}
    layers: dict[str, list[str]] = {}
    for group in expert_groups(n for n, m in modules.items() if isinstance(m, Linear)):
        layers.setdefault(group.layer, []).extend(group.names)
    biased = []
    for layer, names in layers.items():
        taken = [name for name in names if name in groups]
        if any(modules[name]._parameters.get("bias") is not None for name in taken):
            biased.append(layer)
        elif taken and len(taken) < len(names):
            other = next(name for name in names if name not in groups)
            yield (
                f"{taken[0]} would be quantized but {other} would not, and the server stacks all "
                f"experts of {layer}: target them all, or ignore them all"
            )
        elif len({groups[name] for name in taken}) > 1:
            yield (
                f"experts of {layer} belong to different config groups, but the server stacks "
                "them: put them into one group"
            )
    yield from _without_place(model, layers, plan)
    if biased:
        more = f" and {len(biased) - 1} more" if len(biased) > 1 else ""
        yield (
            f"{biased[0]}{more}: experts with a bias, as in gpt-oss, cannot be served from "
            "compressed-tensors: vLLM reads them only stacked, in the MXFP4 that the model was "
            "published in; add 're:.*\\.experts\\..*' to ignore"
        )


def _without_place(model: Any, layers: Mapping[str, list[str]], plan: Plan) -> Iterator[str]:
    known = getattr(getattr(model, "known", None), "model", model)  # the class, for bare files
    kind = getattr(getattr(known, "config", None), "model_type", None)
    if kind not in _WITHOUT_INPUT_GLOBAL_SCALE:
        return
    schemes = {planned.name: planned.scheme for planned in plan.quantized}
    for layer, names in layers.items():
        scheme = schemes.get(names[0])
        inputs = scheme.input_activations if scheme is not None else None
        if inputs is not None and inputs.strategy == "tensor_group":
            yield (
                f"{layer}: vLLM 0.32 fails on input_global_scale of experts when it loads a "
                f"{type(known).__name__}; use NVFP4A16, or add 're:.*\\.experts\\..*' to ignore"
            )
            return
