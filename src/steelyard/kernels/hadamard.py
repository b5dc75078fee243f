"""Hadamard matrices: entries +1 and -1, orthogonal rows.

    Sylvester   order 2, and the product of any two orders
    Paley I     order q + 1       for a prime q = 3 mod 4:  4, 8, 12, 20, 24, 32, 44, ...
    Paley II    order 2 (q + 1)   for a prime q = 1 mod 4:  12, 28, 36, 60, 76, 84, ...

Both of Paley's use the matrix of Legendre symbols, (i - j | q).
"""

from __future__ import annotations

import torch

__all__ = ["hadamard_factors", "hadamard_matrix"]

_LARGEST = 64  # order of a power of two that is one factor


def hadamard_factors(size: int) -> list[torch.Tensor] | None:
    """Return Hadamard matrices whose Kronecker product has this order; None if none is known.

    At most one has an order that is no power of two, and it comes first.
    """
    odd = size
    while odd % 2 == 0:
        odd //= 2
    order = odd
    while size % order == 0:
        base = hadamard_matrix(order)
        if base is not None:
            return [*([base] if order > 1 else []), *_sylvester(size // order)]
        order *= 2
    return None


def hadamard_matrix(order: int) -> torch.Tensor | None:
    """Return a Hadamard matrix of order 1, 2, or by Paley's constructions; None for others."""
    if order in (1, 2):
        return torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)[:order, :order]
    if order % 4:
        return None
    if _is_prime(order - 1):  # 3 mod 4
        return _first(order - 1)
    half = order // 2 - 1
    return _second(half) if half % 4 == 1 and _is_prime(half) else None


def _sylvester(size: int) -> list[torch.Tensor]:
    """Return factors of a power of two, each at most 64 and all about equal."""
    exponent, two = size.bit_length() - 1, torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    parts = -(-exponent // (_LARGEST.bit_length() - 1))
    factors = []
    for part in range(parts):
        factor = torch.ones(1, 1, dtype=torch.float64)
        for _ in range(exponent // parts + (part < exponent % parts)):
            factor = torch.kron(factor, two)
        factors.append(factor)
    return factors


def _first(prime: int) -> torch.Tensor:
    """Paley I: I + [[0, 1], [-1, Q]], with Q antisymmetric."""
    made = torch.eye(prime + 1, dtype=torch.float64)
    made[0, 1:] += 1
    made[1:, 0] -= 1
    made[1:, 1:] += _symbols(prime)
    return made


def _second(prime: int) -> torch.Tensor:
    """Paley II: each entry of [[0, 1], [1, Q]] times [[1, 1], [1, -1]], 0 as [[1, -1], [-1, -1]]"""
    inner = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    inner[0, 1:] = 1
    inner[1:, 0] = 1
    inner[1:, 1:] = _symbols(prime)
    signed = torch.tensor([[1, 1], [1, -1]], dtype=torch.float64)
    zero = torch.tensor([[1, -1], [-1, -1]], dtype=torch.float64)
    return torch.kron(inner, signed) + torch.kron(torch.eye(prime + 1, dtype=torch.float64), zero)


def _symbols(prime: int) -> torch.Tensor:
    """Return the Legendre symbols of i - j: 1 for squares, -1 for others, 0 for 0."""
    symbol = -torch.ones(prime, dtype=torch.float64)
    symbol[[i * i % prime for i in range(1, prime)]] = 1
    symbol[0] = 0
    index = torch.arange(prime)
    return symbol[(index[:, None] - index[None]) % prime]


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % d for d in range(2, int(number**0.5) + 1))
