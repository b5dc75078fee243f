"""The second moment of a layer's inputs: what GPTQ weighs its errors with.

H = sum over tokens of x^T x is symmetric, so only the blocks on and above its diagonal are
computed, and the rest is mirrored once, when all tokens have been seen.
"""

from __future__ import annotations

import torch

__all__ = ["accumulate", "symmetric"]

_BLOCK = 128  # columns; smaller saves multiplications, larger makes each of them cheaper


def accumulate(hessian: torch.Tensor, x: torch.Tensor) -> None:
    """Add x^T x to the upper triangle of `hessian`, in fp32 whatever the type of x.

    hessian: (columns, columns), fp32; what lies below its diagonal blocks is left alone
    x:       (..., columns), any floating type
    """
    columns = x.shape[-1]
    if hessian.shape != (columns, columns) or hessian.dtype != torch.float32:
        raise ValueError(
            f"inputs of {columns} columns need an fp32 Hessian of {columns} by {columns}, got "
            f"{hessian.dtype} of {tuple(hessian.shape)}"
        )
    tokens = x.detach().reshape(-1, columns).to(torch.float32)
    for start in range(0, columns, _BLOCK):
        rows = slice(start, start + _BLOCK)
        hessian[rows, start:].addmm_(tokens[:, rows].t(), tokens[:, start:])


def symmetric(hessian: torch.Tensor) -> torch.Tensor:
    """Return the whole matrix, given one whose upper triangle was accumulated."""
    upper = hessian.triu()
    return upper + upper.triu(1).t()
