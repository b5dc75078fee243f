"""Which rows GPTQ rounds better than rounding to nearest would, and by how much.

The error of a row is e H e^T, which takes as many multiplications as all of the rounding, so it is
computed only as far as the decision needs. H = L L^T, apart from the dampening on its diagonal, and
the error is the squared length of e L:

1. A few entries of e L are a lower bound. Those that are rounded last hold most of the length, and
   where they alone are longer than GPTQ's whole error, the row is decided.
2. For the other rows, and for the sample that the report uses, all of e L is computed.
3. Rows that fp32 cannot tell apart are judged in fp64, with H as it was given.
"""

from __future__ import annotations

import torch

from steelyard.kernels.gptq_factor import Factor

__all__ = ["exact_losses", "judge"]

_MARGIN = 1e-3  # of a row's squared length; far above the rounding of fp32
_HEAD = 48  # entries of the lower bound
_SAMPLE = 256  # rows at least, where there are as many


def judge(
    target: torch.Tensor,
    values: torch.Tensor,
    losses: torch.Tensor,
    nearest_errors: torch.Tensor,
    nearest_shift: torch.Tensor,
    factor: Factor,
    hessian: torch.Tensor,
    mean: float,
    back: torch.Tensor,
    refused: torch.Tensor,
) -> tuple[torch.Tensor, float, float]:
    """Return the rows that gain, the loss with the others rounded to nearest, and that with all.

    target:         (columns, rows), in the order of `factor`; likewise values and nearest_errors
    losses:         (rows,), fp64, e H e^T over `mean`
    nearest_shift:  (rows,), fp64, what dampening adds to the loss of rounding to nearest
    back:           (columns,), the position in that order of each column of `hessian`
    refused:        (rows,), rows that must be rounded to nearest
    """
    rows = len(losses)
    bound = factor.squared_lengths(nearest_errors, _HEAD)
    watched = ~(bound - nearest_shift - losses > _MARGIN * bound) | refused
    sample = torch.arange(0, rows, max(1, rows // _SAMPLE), device=losses.device)
    watched[sample] = True
    index = watched.nonzero().flatten()
    candidates = nearest_errors.index_select(1, index)
    lengths = factor.squared_lengths(candidates)
    ours, nearest = losses[index], lengths - nearest_shift[index]
    unclear = ~((nearest - ours).abs() > _MARGIN * lengths)
    if bool(unclear.any()):
        rows_left = index[unclear]
        errors = target[:, rows_left] - values[:, rows_left]
        ours[unclear] = exact_losses(errors[back], hessian, mean)
        nearest[unclear] = exact_losses(candidates[:, unclear][back], hessian, mean)

    gains = (ours <= nearest) & ~refused[index]
    better = torch.ones_like(watched).index_copy_(0, index, gains)
    losses = losses.index_copy(0, index, torch.where(gains, ours, nearest)).clamp(min=0)
    gain = torch.zeros_like(losses).index_copy_(0, index, torch.where(gains, nearest - ours, 0.0))
    loss = float(losses.sum())
    nearest_loss = loss + float(gain[sample].sum()) * rows / len(sample)
    return better, mean * loss, mean * nearest_loss


def exact_losses(errors: torch.Tensor, hessian: torch.Tensor, mean: float) -> torch.Tensor:
    """Return e H e^T over `mean` for every row, (rows,), computed in fp64.

    errors: (columns, rows), in the order of `hessian`
    """
    wide = errors.double()
    losses = torch.zeros_like(wide[0])
    for start in range(0, len(wide), 256):  # not all of H at once in fp64
        block = slice(start, start + 256)
        losses += ((hessian[block].double() / mean) @ wide * wide[block]).sum(0)
    return losses
