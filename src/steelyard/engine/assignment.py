"""Assigns weights to ranks, and picks the parameters that a rank sends to the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module

from steelyard.distributed import assign
from steelyard.fusion import solved_together

__all__ = ["of_weight", "owners_of"]


def owners_of(modules: Mapping[str, Any], ranks: int) -> dict[str, int]:
    """Assign weights to ranks; weights that share a scale go to one rank."""
    schemes = {name: module.quantization_scheme for name, module in modules.items()}
    units = list(dict.fromkeys(solved_together(schemes).values()))
    owners = assign([sum(_cost(modules[name]) for name in unit) for unit in units], ranks)
    return {name: owner for unit, owner in zip(units, owners, strict=True) for name in unit}


def of_weight(module: Module, solved: bool) -> dict[str, torch.Tensor]:
    """Return the parameters of a module that belong to its weight.

    solved: include the weight itself, which the solver changed
    """
    parameters = {name: p.data for name, p in module._parameters.items() if p is not None}
    return {
        name: value
        for name, value in parameters.items()
        if name.startswith("weight_") or (solved and name == "weight")
    }


def _cost(module: Module) -> float:
    weight = module._parameters.get("weight")
    return 0.0 if weight is None else float(weight.numel())
