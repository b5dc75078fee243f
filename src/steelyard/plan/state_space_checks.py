"""Layers of state spaces that no server runs quantized."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from torch.nn import Module

from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

__all__ = ["unserved_mixers"]

_MAMBA = ("in_proj", "x_proj", "dt_proj", "out_proj")


def unserved_mixers(modules: Mapping[str, Module], plan: Plan) -> Iterator[str]:
    """Yield one sentence for layers of Mamba's first version, as in Jamba and FalconMamba.

    vLLM gives them no quantization, and fails on their scales. Mamba 2, which has no `x_proj`, is
    quantized.
    """
    names = []
    for planned in plan.quantized:
        parent, _, leaf = planned.name.rpartition(".")
        if leaf in _MAMBA and all(f"{parent}.{other}" in modules for other in _MAMBA):
            names.append(planned.name)
    if names:
        mixer = names[0].split(".")[-2]
        yield (
            f"{count(len(names), 'layer')} of Mamba mixers, such as {names[0]}, would be "
            "quantized, and vLLM has no quantized ones: to serve the model with vLLM, add "
            f"'re:.*\\.{mixer}\\..*' to ignore"
        )
