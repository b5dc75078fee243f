"""Smallest and largest value per quantization parameter."""

from __future__ import annotations

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled, use_triton

__all__ = ["compute_dtype", "range_of"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type to compute in for values of `dtype`: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def range_of(
    observed: torch.Tensor, group_dims: int = 1, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and the maximum over observations and group members.

    A NaN anywhere in a group makes at least one of its two values NaN.

    observed:   (num_observations, *qparam_shape, group_size), any floating type
    group_dims: 2 where a group has rows and columns, (..., rows, columns)
    returns:    two tensors (*qparam_shape), in `compute_dtype(observed.dtype)`
    """
    if use_compiled(observed, backend):
        return compiled.range_of(observed, group_dims)
    if use_triton(observed, backend):
        from steelyard.kernels import triton_range

        return triton_range.range_of(observed, group_dims)
    dtype = compute_dtype(observed.dtype)
    dims = (0, *range(-group_dims, 0))
    return torch.amin(observed, dim=dims).to(dtype), torch.amax(observed, dim=dims).to(dtype)
