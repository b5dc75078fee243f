"""Relative error of a stored weight."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import Module

from steelyard.formats.tensor_names import GLOBAL_SCALE
from steelyard.kernels.pack import squared_error
from steelyard.kernels.squares import sum_of_squares

__all__ = ["relative_error", "weight_error"]


def weight_error(module: Module) -> float | None:
    """Return the squared error of the stored weight over the weight's sum of squares."""
    scheme: Any = module.quantization_scheme
    if scheme.weights is None or not isinstance(getattr(module, "weight", None), torch.Tensor):
        return None
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment]
    zero_point = None if scheme.weights.symmetric else module.weight_zero_point
    global_scale = getattr(module, GLOBAL_SCALE, None)
    noise = squared_error(weight, module.weight_scale, zero_point, scheme.weights, global_scale)  # type: ignore[arg-type]
    return relative_error(noise, weight)


def relative_error(noise: float, weight: torch.Tensor) -> float:
    """Return a squared error over the weight's sum of squares.

    It is 1 for weights so small that their squares and those of their errors underflow in fp32: the
    bound of rounding to nearest, and the error on a server that flushes denormals to zero.
    """
    signal = float(sum_of_squares(weight).sum(dtype=torch.float64))
    if not math.isfinite(signal):  # too large for fp32
        signal = float(weight.double().square().sum())
    if signal < weight.numel() * torch.finfo(torch.float32).tiny:
        return float(weight.any())
    return noise / signal
