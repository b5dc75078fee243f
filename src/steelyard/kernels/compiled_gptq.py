"""The compiled kernels of GPTQ behind the reference's signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.backend import instruction_set
from steelyard.kernels.compiled import SCALE_TYPES, format_of, native, threads

if TYPE_CHECKING:
    from steelyard.kernels.gptq_grid import Grid
    from steelyard.kernels.gptq_refine import ScaleSteps

__all__ = [
    "cholesky",
    "columns",
    "eliminate",
    "nearest_errors",
    "refine",
    "solve",
    "squared_lengths",
    "vector_sums",
]


def cholesky(
    hessian: torch.Tensor,
    order: torch.Tensor,
    mean: float,
    added: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor | None:
    """Return U with U^T U = H / mean + diag(added), in an order; None if there is none.

    Entries below the diagonal are undefined.

    out: for U; may be H itself if the order is that of H
    """
    upper = torch.empty(hessian.shape) if out is None else out
    given = hessian.contiguous(), order, mean, added, upper
    found = native().cholesky(*given, instruction_set(), threads(hessian))
    return upper if found else None


def columns(weight: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """Return (out, in) as (columns, rows) in an order, fp32."""
    ordered = torch.empty(weight.shape[1], weight.shape[0])
    given = weight.contiguous(), order.argsort(), ordered
    native().columns(*given, instruction_set(), threads(weight))
    return ordered


def squared_lengths(upper: torch.Tensor, errors: torch.Tensor, entries: int) -> torch.Tensor:
    """Return the squared lengths of the first entries of U e; (rows,), fp64.

    upper:  (columns, columns), of which the upper triangle is read
    errors: (columns, rows)
    """
    lengths = torch.empty(errors.shape[1], dtype=torch.float64)
    given = upper, errors.contiguous(), entries, lengths
    native().squared_lengths(*given, instruction_set(), threads(errors))
    return lengths


def solve(upper: torch.Tensor, values: torch.Tensor, both: bool = True) -> torch.Tensor:
    """Overwrite `values` with (U^T U)^-1 values and return it; without `both`, with U^-1 values.

    upper:  (columns, columns), of which the upper triangle is read
    values: (columns, rows), contiguous
    """
    native().solve(upper, values, both, instruction_set(), threads(values))
    return values


def vector_sums(vectors: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return x^T S x of every column x, or its squares times weights; (rows,), fp64.

    vectors: (columns, rows)
    weights: S, (columns, columns), of which the upper triangle is read; or (columns,)
    """
    sums = torch.empty(vectors.shape[1], dtype=torch.float64)
    given = vectors.contiguous(), weights.contiguous(), sums
    native().vector_sums(*given, instruction_set(), threads(vectors))
    return sums


def eliminate(
    weight: torch.Tensor, upper: torch.Tensor, added: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded weight, (columns, rows), and e H e^T of each row, fp64.

    weight: (columns, rows), fp32; the last column is rounded first
    upper:  (columns, columns), of which the upper triangle is read
    """
    values, losses = torch.empty_like(weight), torch.zeros(weight.shape[1], dtype=torch.float64)
    _gptq(weight, upper, added, grid, values, None, losses)
    return values, losses


def nearest_errors(
    weight: torch.Tensor, added: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of rounding to nearest, (columns, rows), and their squares times `added`.

    The squares are summed over the columns: (rows,), fp64.
    """
    errors, losses = torch.empty_like(weight), torch.zeros(weight.shape[1], dtype=torch.float64)
    _gptq(weight, None, added, grid, None, errors, losses)
    return errors, losses.neg_()


def refine(
    hessian: torch.Tensor,
    target: torch.Tensor,
    grid: Grid,
    steps: ScaleSteps,
    values: torch.Tensor,
    fit: bool,
    block_size: int,
    part: slice = slice(None),
) -> None:
    """Change `values`, (columns, rows), and the scales of the grid, in place: one round.

    block_size: columns between two large products; whole groups if scales are fitted
    part:       the columns to refine, likewise
    """
    first, last, _ = part.indices(len(values))
    native().refine(
        hessian,
        target,
        grid.scale,
        grid.zero_point,
        grid.group,
        first,
        last,
        block_size,
        format_of(grid.args, steps.dtype, steps.divisor),
        SCALE_TYPES[grid.dtype],
        grid.divides_in_dtype,
        grid.tight,
        fit,
        values,
        instruction_set(),
        threads(values),
    )


def _gptq(
    weight: torch.Tensor,
    upper: torch.Tensor | None,
    added: torch.Tensor,
    grid: Grid,
    values: torch.Tensor | None,
    errors: torch.Tensor | None,
    losses: torch.Tensor,
) -> None:
    native().gptq(
        weight,
        upper,
        added,
        grid.scale,
        grid.zero_point,
        grid.group,
        format_of(grid.args, torch.float32),
        SCALE_TYPES[grid.dtype],
        grid.divides_in_dtype,
        grid.tight,
        values,
        errors,
        losses,
        instruction_set(),
        threads(weight),
    )
