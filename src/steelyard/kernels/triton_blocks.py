"""Triton's kernels of GPTQ behind the signatures of the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.compiled import SCALE_TYPES
from steelyard.kernels.triton_codes import CodeFormat
from steelyard.kernels.triton_gptq import block_kernel
from steelyard.kernels.triton_launch import launch, next_power
from steelyard.kernels.triton_refine import refine_kernel

if TYPE_CHECKING:
    from steelyard.kernels.gptq_grid import Grid
    from steelyard.kernels.gptq_refine import ScaleSteps

__all__ = ["gptq_block", "refine_block"]

_ROWS = 32  # of a program
_WIDEST = 256  # columns of a block whose matrices fit in registers; the reference runs wider ones


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
    """As `kernels.gptq_rounding.round_block`."""
    columns, rows = weight.shape
    if columns > _WIDEST:
        from steelyard.kernels.gptq_rounding import round_block

        return round_block(weight, lower, sums, added, grid, values, errors, losses)
    wide = max(16, next_power(columns))
    lower = lower if lower.stride(1) == 1 else lower.contiguous()
    launch(
        block_kernel,
        (-(-rows // _ROWS),),
        weight,
        weight.contiguous(),
        lower,
        sums.contiguous(),
        added.contiguous(),
        grid.scale,
        grid.zero_point,
        grid.group.contiguous(),
        values,
        errors,
        losses,
        columns,
        rows,
        lower.stride(0),
        **_grid_constants(grid, torch.float32),
        COLUMNS=wide,
        ROWS=_ROWS,
        num_warps=_warps_for(wide),
    )


def refine_block(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    steps: ScaleSteps,
    values: torch.Tensor,
    errors: torch.Tensor,
    fit: bool,
) -> None:
    """As `kernels.gptq_refine.refine_block`."""
    columns, rows = values.shape
    if columns > _WIDEST:
        from steelyard.kernels.gptq_refine import refine_block as reference

        return reference(hessian, sums, grid, steps, values, errors, fit)
    wide = max(16, next_power(columns))
    launch(
        refine_kernel,
        (-(-rows // _ROWS),),
        values,
        hessian.contiguous(),
        sums.contiguous(),
        grid.scale,
        grid.zero_point,
        grid.group.contiguous(),
        None if steps.divisor is None else steps.divisor.to(values),
        values,
        errors,
        columns,
        rows,
        **_grid_constants(grid, steps.dtype, steps.divisor is not None),
        FIT=fit,
        COLUMNS=wide,
        ROWS=_ROWS,
        num_warps=2 * _warps_for(wide),
    )


def _grid_constants(
    grid: Grid, scale_dtype: torch.dtype, has_global: bool = False
) -> dict[str, object]:
    """Return what kernels are specialised for: the quantized type and the weight's."""
    return {
        "F": CodeFormat.of(grid.args, scale_dtype, has_global)._replace(
            symmetric=grid.zero_point is None
        ),
        "KIND": SCALE_TYPES[grid.dtype],
        "QUOTIENT": SCALE_TYPES[grid.dtype] if grid.divides_in_dtype else 0,
        "TIGHT": grid.tight,
    }


def _warps_for(columns: int) -> int:
    """Return the warps that share the columns of a block: a matrix takes 32 registers of each."""
    return max(1, columns // 32)
