"""The Hessian of a layer's output error, as GPTQ uses it: H = sum over tokens of x^T x.

(It is the second moment of the inputs, times the number of tokens.) H is symmetric, so only its
upper triangle is computed, in slabs: a slab has some rows of H, from their diagonal block to the
right. Slabs are independent, so several threads add to them without changing a bit.

Products of two bf16 numbers are exact in fp32, where they are added. On processors with avx512_bf16
bf16 inputs are therefore multiplied as they are, at twice the speed of fp32. The sums differ from
those of fp32 inputs with the same values only by rounding, except that numbers below 2^-126 count
as zero.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from steelyard.kernels import compiled
from steelyard.kernels.backend import use_compiled

__all__ = [
    "accumulate",
    "accumulate_product",
    "empty_slab",
    "output_square",
    "slab_starts",
    "symmetric",
]

_ROWS = 128  # fewer save multiplications, more make each of them cheaper


def slab_starts(columns: int) -> range:
    """Return the first row of each slab."""
    return range(0, columns, _ROWS)


def empty_slab(columns: int, start: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the slab of a matrix of zeros that begins with row `start`."""
    return torch.zeros(min(_ROWS, columns - start), columns - start, device=device)


def accumulate(
    slabs: Sequence[torch.Tensor],
    x: torch.Tensor,
    backend: str | None = None,
    fresh: bool = False,
) -> None:
    """Add x^T x to some of its slabs, in place; entries below the diagonal are undefined.

    slabs: each (rows, columns - its first row), fp32
    x:     (tokens, columns)
    fresh: slabs hold nothing yet; their contents do not matter
    """
    starts = [x.shape[1] - slab.shape[1] for slab in slabs]
    if use_compiled(x, backend) and compiled.has_products():
        compiled.add_products(None, x, slabs, starts, fresh)
        return
    wide = x.float()
    for slab, start in zip(slabs, starts, strict=True):
        slab.addmm_(wide[:, start : start + len(slab)].t(), wide[:, start:], beta=0 if fresh else 1)


def accumulate_product(
    slabs: Sequence[torch.Tensor],
    starts: Sequence[int],
    left: torch.Tensor,
    right: torch.Tensor,
    backend: str | None = None,
    fresh: bool = False,
) -> None:
    """Add left^T right to some of its rows, in place.

    slabs:  each (rows, columns), fp32
    starts: the first row of each slab
    left:   (tokens, rows of the product)
    right:  (tokens, columns)
    fresh:  slabs hold nothing yet; their contents do not matter
    """
    if left.dtype != right.dtype:
        left, right = left.float(), right.float()
    if use_compiled(right, backend) and compiled.has_products():
        compiled.add_products(left, right, slabs, starts, fresh)
        return
    left, right = left.float(), right.float()
    for slab, start in zip(slabs, starts, strict=True):
        slab.addmm_(left[:, start : start + len(slab)].t(), right, beta=0 if fresh else 1)


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


def output_square(weight: torch.Tensor, hessian: torch.Tensor) -> float:
    """Return the squared length of the outputs, tr(W H W^T).

    It is the inner product of H and W^T W, both symmetric: a quarter of the work of W H, or less.

    weight:  (out, in)
    hessian: (in, in), fp32, on the same device
    """
    starts = slab_starts(len(hessian))
    slabs = [empty_slab(len(hessian), start, weight.device) for start in starts]
    accumulate(slabs, weight)
    total = 0.0
    for start, slab in zip(starts, slabs, strict=True):
        products = slab.triu_().mul_(hessian[start : start + len(slab), start:])
        diagonal = products.diagonal().sum(dtype=torch.float64)
        total += float(2 * products.sum(dtype=torch.float64) - diagonal)
    return total
