"""The Hessian of a layer's output error, as GPTQ uses it: H = sum over tokens of x^T x.

(It is the second moment of the inputs, times the number of tokens.) H is symmetric, so only its
upper triangle is computed, in slabs: a slab has some rows of H, from their diagonal block to the
right. Slabs are independent, so several threads add to them without changing a bit.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["accumulate", "empty_slab", "slab_starts", "symmetric"]

_ROWS = 128  # fewer save multiplications, more make each of them cheaper


def slab_starts(columns: int) -> range:
    """Return the first row of each slab."""
    return range(0, columns, _ROWS)


def empty_slab(columns: int, start: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the slab of a matrix of zeros that begins with row `start`."""
    return torch.zeros(min(_ROWS, columns - start), columns - start, device=device)


def accumulate(slab: torch.Tensor, x: torch.Tensor) -> None:
    """Add a slab's rows of x^T x to it.

    slab: (rows, columns - its first row), fp32
    x:    (tokens, columns), fp32
    """
    start = x.shape[1] - slab.shape[1]
    slab.addmm_(x[:, start : start + len(slab)].t(), x[:, start:])


def symmetric(slabs: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the whole matrix, given all its slabs."""
    columns = slabs[0].shape[1]
    whole = slabs[0].new_empty(columns, columns)
    for start, slab in zip(slab_starts(columns), slabs, strict=True):
        rows = slice(start, start + len(slab))
        square = slab[:, : len(slab)].triu()
        whole[rows, rows] = square + square.triu(1).t()
        whole[rows, rows.stop :] = slab[:, len(slab) :]
        whole[rows.stop :, rows] = slab[:, len(slab) :].t()
    return whole
