"""How much dampening GPTQ needs, judged by tokens that the Hessian was not computed from.

GPTQ makes up for the error of a column by changing the columns still to come. How is a regression:
of the input of column j on the inputs of the columns rounded after it, with coefficients b_j from
H. Rounding errors are about as large in every column and independent, so the output error that is
left is proportional to

    sum over j of E (x_j - b_j x_<j)^2

which is what the regressions leave unexplained. In the tokens that H was computed from it falls as
dampening falls. In others it has a minimum: without dampening, n columns follow the noise of N
tokens, the more the larger n / N. So even batches fit the regressions with several dampenings, and
odd batches judge them.

With A = H_even + d and A = L L^T, the regression of column j is row j of L^-1, times L_jj:

    sum over j of L_jj^2 (L^-1 H_odd L^-T)_jj

A sample of columns is enough to compare dampenings, if it has those with the largest inputs.
"""

from __future__ import annotations

import torch

from steelyard.kernels import compiled_gptq
from steelyard.kernels.backend import use_compiled
from steelyard.kernels.gptq_factor import LowerFactor, UpperFactor

__all__ = ["STEPS", "held_out_dampening"]

STEPS = (1.0, 3.0, 10.0, 30.0)  # times the least dampening
_SAMPLE = 64  # columns with the largest inputs, and as many of the others


def held_out_dampening(even: torch.Tensor, odd: torch.Tensor, least: float) -> float:
    """Return the dampening, `least` or more, that leaves least in the odd batches.

    even:  (columns, columns) fp32, Hessian of the even batches
    odd:   that of the odd ones
    least: as a fraction of the mean of the diagonal, like what is returned
    """
    sizes = even.diagonal() + odd.diagonal()
    means = [float(each.diagonal().double().mean()) for each in (even, odd)]
    if not (least > 0.0 and min(means) > 0.0 and max(means) < float("inf")):
        return least
    order = torch.argsort(sizes, stable=True)  # rounded from the last to the first
    back = torch.argsort(order)
    kind = UpperFactor if use_compiled(even) else LowerFactor
    columns, weights = _sample(len(order))

    def left(step: int) -> float:
        added = torch.full((len(order),), STEPS[step] * least, device=even.device)
        factor = kind.of(even, order, means[0], added)
        if factor is None:
            return float("inf")
        found = factor.inverse_rows(columns).index_select(0, back)
        unexplained = _squares(found, odd) / means[1]
        pivots = factor.pivots[columns].double().square()
        return float((weights.to(pivots) * pivots * unexplained).sum())

    # The sum has one minimum: two steps in the middle tell on which side of them it is.
    tried = {step: left(step) for step in (1, 2)}
    side = 3 if tried[2] < tried[1] else 0
    tried[side] = left(side)
    return least * STEPS[min(sorted(tried), key=tried.__getitem__)]


def _squares(vectors: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return x^T S x of every column x of a matrix, fp64; S is symmetric."""
    if use_compiled(vectors):
        return compiled_gptq.vector_sums(vectors, matrix)
    return (matrix @ vectors * vectors).sum(0, dtype=torch.float64)


def _sample(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return columns of a sample, the last of them all, and how many each stands for."""
    split = max(count - _SAMPLE, 0)
    stride = max(1, -(-split // _SAMPLE))
    few, most = torch.arange(0, split, stride), torch.arange(split, count)
    weights = torch.cat([torch.full((len(few),), split / max(len(few), 1)), torch.ones(len(most))])
    return torch.cat([few, most]), weights
