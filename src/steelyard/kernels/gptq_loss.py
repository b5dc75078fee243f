"""Which rows GPTQ has rounded better than rounding to nearest would have, and by how much.

The error of a row is e H e^T, which takes as many multiplications as all of the rounding; so it is
looked at no closer than the answer needs. H = L L^T, apart from what dampening has added to its
diagonal, and the error is the squared length of e L:

1. A few entries of e L are a lower bound. Those that are rounded last hold most of the length, and
   where they alone are longer than GPTQ's whole error, nothing more is asked.
2. For the other rows, and for a sample that the report is made from, all of e L is computed.
3. Rows that fp32 cannot tell apart are judged in fp64, with H as it was given.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Judgement", "exact_losses", "judge"]

_MARGIN = 1e-3  # of a row's squared length; far above the rounding of fp32
_HEAD = 128  # entries of the lower bound
_SAMPLE = 512  # rows at least, where there are as many


@dataclass(frozen=True)
class Judgement:
    better: torch.Tensor  # (rows,), whether the row gains
    loss: float  # of these rows as GPTQ rounds them, and of the others as rounded to nearest
    nearest_loss: float  # of all rows as rounded to nearest


def judge(
    errors: torch.Tensor,
    losses: torch.Tensor,
    nearest_errors: torch.Tensor,
    lower: torch.Tensor,
    added: torch.Tensor,
    order: torch.Tensor,
    hessian: torch.Tensor,
    mean: float,
    refused: torch.Tensor,
) -> Judgement:
    """Compare two roundings row by row.

    errors:        (columns, rows), as is nearest_errors, in the order of `lower`
    losses:        (rows,), fp64, e H e^T of the first, over `mean`
    lower, added:  the factor, and what dampening has added to the diagonal
    order:         (columns,), the column of `hessian` that each column here is
    refused:       (rows,), rows that must be rounded to nearest
    """
    rows = len(losses)
    nearest_shift = (added @ nearest_errors.square()).double()
    bound = (lower[:, :_HEAD].t() @ nearest_errors).square().sum(0, dtype=torch.float64)
    watched = ~(bound - nearest_shift - losses > _MARGIN * bound) | refused
    sample = torch.arange(0, rows, max(1, rows // _SAMPLE), device=losses.device)
    watched[sample] = True
    index = watched.nonzero().flatten()
    candidates = nearest_errors if len(index) == rows else nearest_errors.index_select(1, index)
    lengths = _squared_lengths(candidates, lower)
    nearest = lengths - nearest_shift[index]
    unclear = ~((nearest - losses[index]).abs() > _MARGIN * lengths)
    losses = losses.clone()
    if bool(unclear.any()):
        back = torch.argsort(order)
        losses[index[unclear]] = exact_losses(errors[:, index[unclear]][back], hessian, mean)
        nearest[unclear] = exact_losses(candidates[:, unclear][back], hessian, mean)

    better = torch.ones_like(watched)
    better[index] = (losses[index] <= nearest) & ~refused[index]
    gains = torch.zeros_like(losses)
    gains[index] = torch.where(better[index], nearest - losses[index], 0.0)
    losses[index] = torch.where(better[index], losses[index], nearest)
    loss = float(losses.clamp(min=0).sum())
    gain = float(gains[sample].sum()) * rows / len(sample)
    return Judgement(better, mean * loss, mean * (loss + gain))


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


def _squared_lengths(errors: torch.Tensor, lower: torch.Tensor) -> torch.Tensor:
    """Return the squared length of e L for every row; (rows,), fp64."""
    lengths = torch.zeros(errors.shape[1], dtype=torch.float64, device=errors.device)
    for start in range(0, len(errors), 128):
        entries = lower[start:, start : start + 128].t() @ errors[start:]
        lengths += entries.square().sum(0, dtype=torch.float64)
    return lengths
