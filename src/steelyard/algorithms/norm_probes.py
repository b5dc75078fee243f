"""What a norm computes, measured by calling it."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["norm_offset", "subtracts_mean"]


def norm_offset(module: Any, x: torch.Tensor, dtype: torch.dtype) -> float:
    """Return what a norm adds to its weight, measured: 0, or 1 in Gemma."""
    kept = {leaf: p.data for leaf, p in module._parameters.items() if p is not None}
    try:
        outputs = []
        for value in (0.0, 1.0):
            for leaf, data in kept.items():
                fill = value if leaf == "weight" else 0.0
                module._parameters[leaf].data = torch.full_like(data, fill, dtype=dtype)
            outputs.append(module(x).double())
    finally:
        for leaf, data in kept.items():
            module._parameters[leaf].data = data
    at_zero, step = outputs[0], outputs[1] - outputs[0]
    total = float(step.square().sum())
    return round(float((at_zero * step).sum()) / total, 3) if total else 0.0


def subtracts_mean(module: Any, x: torch.Tensor) -> bool:
    """Whether a norm subtracts the mean of the channels first, as LayerNorm does."""
    moved = module(x + x.abs().amax()).double() - module(x).double()
    return float(moved.norm()) < 1e-3 * float(module(x).double().norm())
