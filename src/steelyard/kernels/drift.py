"""The weight that GPTQ should round to when its inputs have drifted.

The blocks before a layer are quantized, so its input is x^ where the original model has x. The
output to match is W x:

    E |W x - Q x^|^2 = |(W* - Q) H^(1/2)|^2 + const,    W* = W + R H^-1,    R = W E[(x - x^) x^^T]

so the solver does not change: it rounds to W* instead of W. H belongs to the input, and weights
with the same input share it.

The shift R H^-1 is a least-squares fit and overfits where tokens are few. Two things shrink it. H
gets as many tokens more as it has columns, of average size and uncorrelated: that takes most from
the directions that inputs rarely have. And each half of the batches judges the fit of the other:

    a = sum of <G_k, R_j> / sum of tr(G_k H_j G_k^T),    G_k = R_k H_k^-1,    j the other half

is the factor on the shift that costs least on tokens that the shift was not fitted to. One factor
for all rows needs no more than a hundred of them.
"""

from __future__ import annotations

import torch

from steelyard.kernels import compiled_gptq
from steelyard.kernels.backend import use_compiled

__all__ = ["InputDrift"]

_SAMPLE = 128  # rows at least that the factor is computed from, where there are as many

_Pair = tuple[torch.Tensor, torch.Tensor]


class InputDrift:
    """The drift of one input in two halves of the batches.

    hessians:       of each half, (in, in) fp32, the sum of x^ x^^T; overwritten
    drifts:         of each half, fp32: the sum of (x - x^) x^^T, (in, in); or that multiplied by
                    all the weights that have this input, one above the other, (rows, in)
    tokens:         of both halves
    dampening_frac: added to each Hessian's diagonal too, as a fraction of its mean
    rows:           of all weights to be shifted; if there are as many as columns, the shift of an
                    identity is computed once, instead of a solution for each weight
    multiplied:     whether the drifts are multiplied by the weights
    """

    def __init__(
        self,
        hessians: _Pair,
        drifts: _Pair,
        tokens: int,
        dampening_frac: float = 0.01,
        rows: int = 0,
        multiplied: bool = False,
    ) -> None:
        self._drifts = drifts
        self._multiplied = multiplied
        total = hessians[0] + hessians[1]
        ridge = len(total) * _mean(total) / max(tokens, 1)
        self._halves = [_Factor(each, ridge, dampening_frac) for each in hessians]
        self._both = _Factor(total, ridge, dampening_frac)
        self._shared: torch.Tensor | None = None
        if not multiplied and rows >= len(total) and self._both.exists:
            self._shared = self._both.solved(drifts[0] + drifts[1])

    def shifted(self, weight: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, float]:
        """Return the weight to round to, (out, in) fp32, and the factor on the shift, 0 to 1.

        weight: (out, in)
        start:  the weight's first row in multiplied drifts
        """
        wide = weight.detach().float()
        drifts = list(self._drifts)
        if self._multiplied:
            drifts = [drift[start : start + len(wide)] for drift in drifts]
        some = slice(None, None, max(1, len(wide) // _SAMPLE))
        factor = self._factor(
            [drift[some] if self._multiplied else wide[some] @ drift for drift in drifts]
        )
        if not factor:
            return wide, 0.0
        if self._shared is not None:
            shift = wide @ self._shared
        else:
            both = drifts[0] + drifts[1]
            shift = self._both.solved(both if self._multiplied else wide @ both)
        low, high = shift.aminmax()  # NaN if there is one
        if not bool(low.isfinite() & high.isfinite()):
            return wide, 0.0
        return wide.add(shift, alpha=factor), factor

    def _factor(self, moments: list[torch.Tensor]) -> float:
        """Return the factor on the shift; 0 where no half confirms the other.

        moments: R of some rows, of each half
        """
        if not (self._both.exists and all(half.exists for half in self._halves)):
            return 0.0
        gain = cost = 0.0
        for one, other in ((0, 1), (1, 0)):
            fit = self._halves[one].solved(moments[one])
            gain += _inner(fit, moments[other])
            cost += self._halves[other].cost(fit)
        if not (gain > 0.0 and cost > 0.0):  # NaN, too
            return 0.0
        return min(gain / cost, 1.0)


class _Factor:
    """The Cholesky factor of H over its mean diagonal, with a larger diagonal.

    hessian: overwritten
    ridge:   added to the diagonal
    """

    def __init__(self, hessian: torch.Tensor, ridge: float, dampening_frac: float) -> None:
        self.mean = _mean(hessian)
        self.exists = self.mean > 0.0
        self._upper = hessian  # what is below its diagonal has no meaning
        if self.exists:
            self.added = ridge / self.mean + dampening_frac
            self.exists = _factorise(hessian, self.mean, self.added)

    def solved(self, moment: torch.Tensor) -> torch.Tensor:
        """Return R H^-1."""
        if use_compiled(moment):
            values = (moment / self.mean).t().contiguous()
            return compiled_gptq.solve(self._upper, values).t()
        # two solutions from the right are faster than `cholesky_solve`
        half = torch.linalg.solve_triangular(
            self._upper, moment / self.mean, upper=True, left=False
        )
        found: torch.Tensor = torch.linalg.solve_triangular(
            self._upper.t(), half, upper=False, left=False
        )
        return found

    def cost(self, fit: torch.Tensor) -> float:
        """Return tr(G H G^T), without what was added to the diagonal."""
        if use_compiled(fit):
            lengths = compiled_gptq.squared_lengths(self._upper, fit.t(), len(self._upper))
            square = float(lengths.sum())
        else:
            long = fit @ self._upper.triu().t()
            square = _inner(long, long)
        return self.mean * (square - self.added * _inner(fit, fit))


def _factorise(hessian: torch.Tensor, mean: float, added: float) -> bool:
    """Overwrite H with U, U^T U = H / mean + added; return whether there is one."""
    if use_compiled(hessian):
        order = torch.arange(len(hessian))
        more = torch.full((len(hessian),), added)
        return compiled_gptq.cholesky(hessian, order, mean, more, out=hessian) is not None
    hessian.div_(mean).diagonal().add_(added)
    upper, info = torch.linalg.cholesky_ex(hessian, upper=True)
    hessian.copy_(upper)
    return int(info) == 0


def _mean(hessian: torch.Tensor) -> float:
    return float(hessian.diagonal().double().mean())


def _inner(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))
