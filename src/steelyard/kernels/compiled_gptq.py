"""The compiled kernels of GPTQ behind the reference's signatures."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.backend import instruction_set
from steelyard.kernels.compiled import SCALE_TYPES, format_of, native, threads

if TYPE_CHECKING:
    from steelyard.kernels.gptq_grid import Grid
    from steelyard.kernels.gptq_refine import ScaleSteps

__all__ = ["gptq_block", "gptq_nearest", "refine_block"]


def gptq_block(
    weight: torch.Tensor,
    lower: torch.Tensor,
    sums: torch.Tensor,
    added: torch.Tensor,
    grid: Grid,
    values: torch.Tensor,
    errors: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """Fill `values` and `errors`, (columns, rows), and add to `losses`, fp64 of shape (rows,)."""
    _gptq(weight, lower.t().contiguous(), sums, added, grid, values, errors, losses)


def gptq_nearest(
    weight: torch.Tensor, added: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of rounding to nearest, (columns, rows), and their squares times `added`.

    The squares are summed over the columns: (rows,), fp64.
    """
    errors, losses = torch.empty_like(weight), torch.zeros(weight.shape[1], dtype=torch.float64)
    _gptq(weight, None, None, added, grid, None, errors, losses)
    return errors, losses.neg_()


def refine_block(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    steps: ScaleSteps,
    values: torch.Tensor,
    errors: torch.Tensor,
    fit: bool,
) -> None:
    """Change `values`, `errors`, (columns, rows), and the scales of the grid, in place."""
    native().refine_block(
        hessian,
        sums,
        grid.scale,
        grid.zero_point,
        grid.group,
        format_of(grid.args, steps.dtype, steps.divisor),
        SCALE_TYPES[grid.dtype],
        grid.divides_in_dtype,
        grid.tight,
        fit,
        values,
        errors,
        instruction_set(),
        threads(values),
    )


def _gptq(
    weight: torch.Tensor,
    lower: torch.Tensor | None,
    sums: torch.Tensor | None,
    added: torch.Tensor,
    grid: Grid,
    values: torch.Tensor | None,
    errors: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    native().gptq_block(
        weight,
        lower,
        sums,
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
