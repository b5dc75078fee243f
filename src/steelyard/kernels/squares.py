"""Sum of squares per column, from which importance is computed."""

from __future__ import annotations

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled, use_triton

__all__ = ["sum_of_squares"]


def sum_of_squares(x: torch.Tensor, backend: str | None = None) -> torch.Tensor:
    """Return the sum of x^2 over all but the last dimension, fp32.

    x: (..., columns), any floating type
    """
    if use_compiled(x, backend):
        return compiled.sum_of_squares(x)
    if use_triton(x, backend):
        from steelyard.kernels import triton_squares

        return triton_squares.sum_of_squares(x)
    return x.detach().reshape(-1, x.shape[-1]).float().square().sum(dim=0)
