"""The weight that GPTQ should round to when its inputs have drifted.

The blocks before a layer are quantized, so its input is x^ where the original model has x. The
output to match is W x, and for a layer that adds to the residual stream W x + r, where r is the
error that the stream has there (original minus quantized). With u = W (x - x^) + r,

    E |W x + r - Q x^|^2 = |(W* - Q) H^(1/2)|^2 + const,    W* = W + R H^-1,    R = E[u x^^T]

so the solver does not change: it rounds to W* instead of W. The shift R H^-1 is a least-squares fit
and overfits where tokens are few. Each half of the batches therefore judges the fit of the other:

    a = sum of <G_k, R_j> / sum of tr(G_k H_j G_k^T),    G_k = R_k H_k^-1,    j the other half

is the factor on the shift that costs least on tokens that the shift was not fitted to.
"""

from __future__ import annotations

import torch

__all__ = ["shifted_weight"]


def shifted_weight(
    weight: torch.Tensor,
    hessians: tuple[torch.Tensor, torch.Tensor],
    drifts: tuple[torch.Tensor, torch.Tensor],
    dampening_frac: float = 0.01,
) -> tuple[torch.Tensor, float]:
    """Return the weight to round to, (out, in) fp32, and the factor on the shift, 0 to 1.

    weight:         (out, in)
    hessians:       of each half of the batches, (in, in) fp32, the sum of x^ x^^T
    drifts:         R of each half, (out, in) fp32, the sum of u x^^T
    dampening_frac: added to each Hessian's diagonal, as a fraction of its mean
    """
    wide = weight.detach().float()
    fits = [_fitted(h, r, dampening_frac) for h, r in zip(hessians, drifts, strict=True)]
    total = _fitted(hessians[0] + hessians[1], drifts[0] + drifts[1], dampening_frac)
    if total is None or fits[0] is None or fits[1] is None:
        return wide, 0.0
    gain = cost = 0.0
    for fit, hessian, drift in zip(fits, reversed(hessians), reversed(drifts), strict=True):
        assert fit is not None
        gain += _inner(fit, drift)
        cost += _inner(fit @ hessian, fit)
    if not (gain > 0.0 and cost > 0.0):  # NaN, too
        return wide, 0.0
    factor = min(gain / cost, 1.0)
    return wide.add(total, alpha=factor), factor


def _fitted(
    hessian: torch.Tensor, drift: torch.Tensor, dampening_frac: float
) -> torch.Tensor | None:
    """Return R H^-1; None where H has no Cholesky factor."""
    mean = hessian.diagonal().double().mean()
    if not bool(mean > 0.0):
        return None
    damped = (hessian / mean).float()
    damped.diagonal().add_(dampening_frac)
    lower, info = torch.linalg.cholesky_ex(damped)
    if int(info) != 0:
        return None
    found = torch.cholesky_solve((drift / mean).float().t(), lower).t()
    return found if bool(found.isfinite().all()) else None


def _inner(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))
