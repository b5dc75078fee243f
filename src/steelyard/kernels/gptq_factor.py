"""The Cholesky factor of a Hessian, with dampening raised until it exists."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from steelyard.kernels import compiled_gptq

__all__ = ["Factor", "LowerFactor", "UpperFactor", "factorise"]

_ATTEMPTS = 5  # factorisations, each with ten times the dampening of the one before
_LEAST_RAISED = 1e-4  # dampening of a second attempt, where the first had next to none
_BLOCK = 128  # entries of e L at a time


class Factor(Protocol):
    """L of H = L L^T, however it is stored."""

    def squared_lengths(self, errors: torch.Tensor, entries: int | None = None) -> torch.Tensor:
        """Return the squared length of e L for every row, or of its first entries; (rows,), fp64.

        errors: (columns, rows), in the order of the factor
        """

    def inverse_rows(self, rows: torch.Tensor) -> torch.Tensor:
        """Return some rows of L^-1, as the columns of a matrix."""

    @property
    def pivots(self) -> torch.Tensor:
        """The diagonal of L."""


@dataclass(frozen=True)
class LowerFactor:
    """L as torch finds it, of which the reference and Triton's kernels take blocks."""

    lower: torch.Tensor  # (columns, columns), zero above the diagonal

    @classmethod
    def of(
        cls, hessian: torch.Tensor, order: torch.Tensor, mean: float, added: torch.Tensor
    ) -> LowerFactor | None:
        """Factorise H / mean + diag(added), in an order; None if it is not positive definite."""
        damped = hessian.index_select(0, order).index_select(1, order).div_(mean)
        damped.diagonal().add_(added)
        lower, info = torch.linalg.cholesky_ex(damped)
        found = int(info) == 0 and bool(lower.diagonal().isfinite().all())
        return cls(lower) if found else None

    def squared_lengths(self, errors: torch.Tensor, entries: int | None = None) -> torch.Tensor:
        lengths = torch.zeros(errors.shape[1], dtype=torch.float64, device=errors.device)
        count = len(errors) if entries is None else min(entries, len(errors))
        for start in range(0, count, _BLOCK):
            block = self.lower[start:, start : min(start + _BLOCK, count)].t() @ errors[start:]
            lengths += block.square().sum(0, dtype=torch.float64)
        return lengths

    def inverse_rows(self, rows: torch.Tensor) -> torch.Tensor:
        units = _units(self.lower, rows)
        found: torch.Tensor = torch.linalg.solve_triangular(self.lower.t(), units, upper=True)
        return found

    @property
    def pivots(self) -> torch.Tensor:
        return self.lower.diagonal()


@dataclass(frozen=True)
class UpperFactor:
    """L^T as the compiled kernel leaves it; what is below the diagonal has no meaning."""

    upper: torch.Tensor  # (columns, columns)

    @classmethod
    def of(
        cls, hessian: torch.Tensor, order: torch.Tensor, mean: float, added: torch.Tensor
    ) -> UpperFactor | None:
        """As `LowerFactor.of`."""
        upper = compiled_gptq.cholesky(hessian, order, mean, added)
        return None if upper is None else cls(upper)

    def squared_lengths(self, errors: torch.Tensor, entries: int | None = None) -> torch.Tensor:
        count = len(errors) if entries is None else min(entries, len(errors))
        return compiled_gptq.squared_lengths(self.upper, errors, count)

    def inverse_rows(self, rows: torch.Tensor) -> torch.Tensor:
        return compiled_gptq.solve(self.upper, _units(self.upper, rows), both=False)

    @property
    def pivots(self) -> torch.Tensor:
        return self.upper.diagonal()


def _units(factor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return these columns of the unit matrix."""
    units = factor.new_zeros(len(factor), len(rows))
    units[rows, torch.arange(len(rows))] = 1.0
    return units


def factorise(
    hessian: torch.Tensor,
    reverse: torch.Tensor,
    mean: float,
    dampening_frac: float,
    kind: type[LowerFactor] | type[UpperFactor] = LowerFactor,
) -> tuple[Factor | None, torch.Tensor, float]:
    """Return L, the amount added to the diagonal, and the dampening.

    L is None where none of the dampenings tried makes H positive definite.
    """
    dead = (hessian.diagonal()[reverse] == 0).float()  # such a row is all zero, so any pivot works
    frac = dampening_frac
    for attempt in range(_ATTEMPTS):
        frac = dampening_frac if attempt == 0 else max(10 * frac, _LEAST_RAISED)
        if (factor := kind.of(hessian, reverse, mean, dead + frac)) is not None:
            return factor, dead + frac, frac
    return None, dead + frac, frac
