"""Smallest and largest value per quantization parameter."""

from __future__ import annotations

import torch

__all__ = ["compute_dtype", "range_of"]


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which values of `dtype` are worked on: fp32, or fp64 for fp64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def range_of(observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the minimum and the maximum over observations and group members.

    A NaN anywhere in a group makes both its values NaN.

    observed: (num_observations, *qparam_shape, group_size), any floating type
    returns:  two tensors (*qparam_shape), in `compute_dtype(observed.dtype)`
    """
    dtype = compute_dtype(observed.dtype)
    low = torch.amin(observed, dim=(0, -1))
    high = torch.amax(observed, dim=(0, -1))
    return low.to(dtype), high.to(dtype)
