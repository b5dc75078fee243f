"""Orthogonal matrices that are applied without being built.

    Q = diag(signs) (F1 x F2 x ...)      Kronecker product of small orthogonal factors

A product with a vector of n channels takes n times the sum of the factors' orders. Everything is
in fp64: rounding to the stored type happens once, after all of it.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from steelyard.kernels.hadamard import hadamard_factors

__all__ = ["Rotation", "make_rotation"]

_AT_ONCE = 1 << 22  # elements in fp64


@dataclass(frozen=True)
class Rotation:
    """An orthogonal matrix of order `size`; wider tensors are rotated in blocks of that size.

    factors: orthogonal, fp64; the product of their orders is `size`
    signs:   (size,) of +1 and -1; None for all +1
    """

    size: int
    factors: tuple[torch.Tensor, ...]
    signs: torch.Tensor | None = None

    def rotate(self, x: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """Return x Q along one dimension, in fp64: (..., k * size) -> (..., k * size)."""
        turned = x.movedim(dim, -1)
        flat = turned.reshape(-1, self.size)  # (rows, size)
        out = torch.empty(flat.shape, dtype=torch.float64, device=x.device)
        step = max(_AT_ONCE // self.size, 1)
        for start in range(0, len(flat), step):
            rows = slice(start, start + step)
            out[rows] = self._product(flat[rows].double())
        return out.reshape(turned.shape).movedim(-1, dim)

    def matrix(self) -> torch.Tensor:
        """Return Q, (size, size)."""
        return self.rotate(torch.eye(self.size, dtype=torch.float64))

    def inverse(self) -> Rotation:
        """Return the rotation by Q^T."""
        return Rotation(self.size, (self.matrix().t().contiguous(),))

    def _product(self, rows: torch.Tensor) -> torch.Tensor:
        """(rows, size) -> (rows, size)"""
        if self.signs is not None:
            rows = rows * self.signs.to(rows.device)
        right = self.size
        for factor in self.factors:
            order = len(factor)
            right //= order
            apart = rows.reshape(-1, order, right)
            rows = factor.to(rows.device).t() @ apart  # (..., order, right)
        return rows.reshape(-1, self.size)


def make_rotation(kind: str, size: int, seed: str = "") -> Rotation:
    """Return a rotation, the same for the same arguments.

    kind: hadamard         a Hadamard matrix over the root of its size. Where none of that size is
                           known, the factor without one is a random orthogonal matrix
          random-hadamard  the same with random signs
          random-matrix    a random orthogonal matrix
    """
    generator = torch.Generator().manual_seed(_number(seed))
    signs = None
    if kind == "random-matrix":
        return Rotation(size, (_random_orthogonal(size, generator),))
    if kind == "random-hadamard":
        signs = torch.randint(0, 2, (size,), generator=generator).double() * 2 - 1
    known = hadamard_factors(size)
    if known is not None:
        return Rotation(size, tuple(each / len(each) ** 0.5 for each in known), signs)
    power = size & -size  # the largest power of two that divides it
    rest = _random_orthogonal(size // power, generator)
    powers = [each / len(each) ** 0.5 for each in hadamard_factors(power) or ()]
    return Rotation(size, (rest, *powers), signs)


def _random_orthogonal(size: int, generator: torch.Generator) -> torch.Tensor:
    """Return a random orthogonal matrix, evenly distributed (Mezzadri 2007)."""
    drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(drawn)
    signed: torch.Tensor = q * r.diagonal().sign()
    return signed


def _number(seed: str) -> int:
    return int.from_bytes(hashlib.sha256(seed.encode()).digest()[:7], "big")
