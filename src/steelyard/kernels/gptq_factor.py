"""The Cholesky factor of a Hessian, with dampening raised until it exists."""

from __future__ import annotations

import torch

__all__ = ["factorise"]

_ATTEMPTS = 5  # factorisations, each with ten times the dampening of the one before
_LEAST_RAISED = 1e-4  # dampening of a second attempt, where the first had next to none


def factorise(
    hessian: torch.Tensor, reverse: torch.Tensor, mean: float, dampening_frac: float
) -> tuple[torch.Tensor | None, torch.Tensor, float]:
    """Return L, the amount added to the diagonal, and the dampening.

    L is None where none of the dampenings tried makes H positive definite.
    """
    damped = hessian.index_select(0, reverse).index_select(1, reverse).div_(mean)
    diagonal = damped.diagonal()
    undamped = diagonal.clone()
    dead = (undamped == 0).float()  # such a row is all zero, so any pivot works
    frac = dampening_frac
    for attempt in range(_ATTEMPTS):
        frac = dampening_frac if attempt == 0 else max(10 * frac, _LEAST_RAISED)
        diagonal.copy_(undamped + (dead + frac))
        lower, info = torch.linalg.cholesky_ex(damped)
        if int(info) == 0 and bool(lower.diagonal().isfinite().all()):
            return lower, dead + frac, frac
    return None, dead + frac, frac
