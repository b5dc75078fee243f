"""The weight that GPTQ should round to when its inputs have drifted.

The blocks before a layer are quantized, so its input is x^ where the original model has x. The
output to match is W x:

    E |W x - Q x^|^2 = |(W* - Q) H^(1/2)|^2 + const,    W* = W + R H^-1,    R = W E[(x - x^) x^^T]

so the solver does not change: it rounds to W* instead of W.

The shift R H^-1 is a least-squares fit and overfits where tokens are few. Two things shrink it. A
ridge on the diagonal of H takes most from the directions that inputs rarely have. And each half of
the batches judges the fit of the other:

    a = sum of <G_k, R_j> / sum of tr(G_k H_j G_k^T),    G_k = R_k H_k^-1,    j the other half

is the factor on the shift that costs least for moments R that the shift was not fitted to. One
factor for all rows needs no more than a hundred of them. It is R that has the noise of few tokens;
H is about the same in both halves, so that of all tokens stands for both, and is factorised once.
"""

from __future__ import annotations

import torch

__all__ = ["InputDrift"]

_SAMPLE = 128  # rows at least that the factor is computed from, where there are as many

_Pair = tuple[torch.Tensor, torch.Tensor]


class InputDrift:
    """The drift of one input in two halves of the batches.

    hessians:   of each half, (in, in) fp32, the sum of x^ x^^T; the first is overwritten
    moments:    of each half, fp32: the sum of (x - x^) x^^T, (in, in); or that multiplied by all
                the weights that have this input, one above the other, (rows, in)
    ridge:      added to the diagonal of H, as a fraction of its mean
    multiplied: whether the moments are multiplied by the weights
    rows:       of all weights to be shifted; if there are as many as columns, the shift of an
                identity is computed once, instead of a solution for each weight
    """

    def __init__(
        self,
        hessians: _Pair,
        moments: _Pair,
        ridge: float,
        multiplied: bool = False,
        rows: int = 0,
    ) -> None:
        self._moments = moments
        self._multiplied = multiplied
        means = [_mean(each) for each in hessians]
        self._shares = [mean / sum(means) if sum(means) > 0.0 else 0.0 for mean in means]
        self._factor = _Factor(hessians[0].add_(hessians[1]), ridge)
        self._shared: torch.Tensor | None = None
        if not multiplied and rows >= len(hessians[0]) and self._factor.exists:
            self._shared = self._factor.solved(moments[0] + moments[1])

    def shifted(self, weight: torch.Tensor, start: int = 0) -> tuple[torch.Tensor, float]:
        """Return the weight to round to, (out, in) fp32, and the factor on the shift, 0 to 1.

        weight: (out, in)
        start:  the weight's first row in multiplied moments
        """
        wide = weight.detach().float()
        rows = slice(0, len(wide), max(1, len(wide) // _SAMPLE))
        scale = self._scale([self._moment(half, wide, start, rows) for half in (0, 1)])
        if not scale:
            return wide, 0.0
        if self._shared is not None:
            shift = wide @ self._shared
        else:
            both = self._moments[0] + self._moments[1]
            moment = both[start : start + len(wide)] if self._multiplied else wide @ both
            shift = self._factor.solved(moment)
        if not bool(shift.isfinite().all()):
            return wide, 0.0
        return wide.add(shift, alpha=scale), scale

    def _moment(self, half: int, weight: torch.Tensor, start: int, rows: slice) -> torch.Tensor:
        """Return R of some rows of a weight."""
        moment = self._moments[half]
        if self._multiplied:
            return moment[start : start + len(weight)][rows]
        return weight[rows] @ moment

    def _scale(self, moments: list[torch.Tensor]) -> float:
        """Return the factor on the shift of some rows; 0 where no half confirms the other."""
        if not (self._factor.exists and min(self._shares) > 0.0):
            return 0.0
        gain = cost = 0.0
        # with H = L L^T: <G_k, R_j> and tr(G_k H G_k^T) are inner products of what L^-T makes of R
        half = self._factor.half_solved(torch.cat(moments))
        fits = self._factor.other_half(half).chunk(2)
        halves = half.chunk(2)
        for one, other in ((0, 1), (1, 0)):
            share = self._shares[one]  # H of this half is about so much of all of it
            gain += _inner(halves[one], halves[other]) / share
            length = _inner(halves[one], halves[one])
            length -= self._factor.ridge * _inner(fits[one], fits[one])
            cost += length * self._shares[other] / share**2
        if not (gain > 0.0 and cost > 0.0):  # NaN, too
            return 0.0
        return min(gain / cost, 1.0)


class _Factor:
    """The Cholesky factor of H over its mean diagonal, with a larger diagonal.

    hessian: overwritten
    ridge:   added to the diagonal, as a fraction of its mean
    """

    def __init__(self, hessian: torch.Tensor, ridge: float) -> None:
        self.mean = _mean(hessian)
        self.exists = self.mean > 0.0
        self.lower = hessian
        self.ridge = ridge
        if self.exists:
            hessian.div_(self.mean).diagonal().add_(ridge)
            info = torch.empty((), dtype=torch.int32, device=hessian.device)
            torch.linalg.cholesky_ex(hessian, out=(self.lower, info))
            self.exists = int(info) == 0

    def solved(self, moment: torch.Tensor) -> torch.Tensor:
        """Return R H^-1; two solutions from the right are faster than `cholesky_solve`."""
        return self.other_half(self.half_solved(moment))

    def half_solved(self, moment: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.solve_triangular(
            self.lower.t(), moment / self.mean, upper=True, left=False
        )
        return found

    def other_half(self, half: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.linalg.solve_triangular(
            self.lower, half, upper=False, left=False
        )
        return found


def _mean(hessian: torch.Tensor) -> float:
    return float(hessian.diagonal().double().mean())


def _inner(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one * other).sum(dtype=torch.float64))
