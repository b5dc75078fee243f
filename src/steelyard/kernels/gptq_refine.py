"""After GPTQ: scales for its codes, then codes for those scales, in turn.

With e = w - q the error of a row is e H e^T. Two steps lower it, each to the exact minimum over the
values it changes, and each is kept only if the error of the stored row falls:

- The scale of a group. With u the group's codes (less the zero point), moving the scale by t adds
  t^2 u H u^T - 2 t (H e) u^T to the error, so t = (H e) u^T / u H u^T is best. That is a parabola:
  of all scales that can be stored, the one nearest to its minimum is the best. Scales of one byte
  lie so far apart that this is mostly the one that the codes were rounded with. So the next one
  above and the next one below are tried too. All three get codes of their own before they are
  compared: those that the other step finds for them, column by column.
- The code of a column. The error is a parabola in q_j too, with its minimum at
  q_j + (H e)_j / H_jj, and the code nearest to that is the best.

NVFP4's global scale stays as it is. Once the groups have their scales, the best factor for it takes
less than 0.02 % off the error: see benchmarks/README.md.

GPTQ fixes the first columns before it knows the errors of the last, and its scales before any
code. A round goes once over all groups, each with its scale and then its columns; the product H e
is computed again for each block of columns.

Matrices are (columns, rows) in here, as in gptq_rounding.py, in the order of the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from steelyard.kernels import compiled_gptq
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.qparams import nearest_scale, scale_dtype_of
from steelyard.kernels.rounding import round_to_type

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["ScaleSteps", "refine", "refine_block"]

_BLOCK = 128  # columns between two large products, about
_TRIES = 2  # sweeps over the codes of a group with a new scale, before it is compared
_WIDEST = 256  # columns of a group whose scale is fitted within a block


@dataclass(frozen=True)
class ScaleSteps:
    """How a scale may move: the type that it is stored in, and the global scale that divides it."""

    dtype: torch.dtype
    divisor: torch.Tensor | None

    @classmethod
    def of(
        cls, args: QuantizationArgs, scale: torch.Tensor, global_scale: torch.Tensor | None
    ) -> ScaleSteps:
        return cls(scale_dtype_of(args, scale.dtype), global_scale)

    def nearest(self, scale: torch.Tensor) -> torch.Tensor:
        """Return the stored scale nearest to a wanted one, as the server reads it; both fp32."""
        return self._read(self.stored(scale))

    def _read(self, stored: torch.Tensor) -> torch.Tensor:
        return stored if self.divisor is None else stored / self.divisor

    @property
    def coarse(self) -> bool:
        """Whether scales lie so far apart that few can move unless codes move with them."""
        return self.dtype in (torch.float8_e4m3fn, torch.uint8)

    def beside(self, scale: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next coarse scales below and above; the scale itself where there is none."""
        stored = self.stored(scale)
        power = torch.ldexp(torch.ones_like(stored), torch.frexp(stored).exponent - 1)
        if self.dtype == torch.uint8:
            low, high = (stored / 2).clamp(min=2.0**-127), (stored * 2).clamp(max=2.0**127)
        else:
            gap = power.clamp(min=2.0**-6) / 8
            halved = (stored == power) & (power > 2.0**-6)
            low = (stored - torch.where(halved, gap / 2, gap)).clamp(min=2.0**-9)
            high = (stored + gap).clamp(max=448.0)
        return self._read(low), self._read(high)

    def stored(self, scale: torch.Tensor) -> torch.Tensor:
        wide = scale if self.divisor is None else scale * self.divisor
        return nearest_scale(wide.abs(), self.dtype).float().copysign(scale)


def refine(
    target: torch.Tensor,
    hessian: torch.Tensor,
    grid: Grid,
    values: torch.Tensor,
    steps: ScaleSteps,
    rounds: int,
    run_block: Callable[..., None] | None,
) -> tuple[torch.Tensor, Grid]:
    """Return stored values with a smaller error, and the grid that has their scales.

    target:    (columns, rows), fp32, the weight to approximate
    hessian:   (columns, columns), fp32
    grid:      with the columns in the order of the weight
    values:    (columns, rows), fp32, each on the grid; changed in place
    run_block: `refine_block`, or a kernel that does the same; None for the compiled one of all
               blocks
    """
    grid = replace(grid, scale=grid.scale.clone())
    width = len(target) if len(grid.scale) == 1 else int((grid.group == 0).sum())
    movable = grid.movable and not grid.tight
    inside = movable and width <= _WIDEST
    block_size = max(_BLOCK // width * width, width) if inside else _BLOCK
    for _ in range(rounds):
        errors = target - values  # again, without the rounding errors of many small steps
        if movable and not inside:
            for group in range(len(grid.scale)):
                _fit_wide(hessian, grid, steps, values, errors, (grid.group == group).nonzero())
        if run_block is None:
            compiled_gptq.refine(hessian, target, grid, steps, values, inside, block_size)
            continue
        for start in range(0, len(target), block_size):
            block = slice(start, min(start + block_size, len(target)))
            sums = hessian[block] @ errors
            within = hessian[block, block].contiguous()
            run_block(
                within, sums, grid.columns(block), steps, values[block], errors[block], inside
            )
    return values, grid


def refine_block(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    steps: ScaleSteps,
    values: torch.Tensor,
    errors: torch.Tensor,
    fit: bool,
) -> None:
    """Move the scales, if `fit`, and the codes of a block of whole groups; all in place.

    hessian: (columns, columns), its diagonal block
    sums:    (columns, rows), H e of these columns
    """
    for group in sorted(set(grid.group.tolist())):
        columns = (grid.group == group).nonzero().flatten()
        part = slice(int(columns[0]), int(columns[-1]) + 1)
        if fit:
            found = _fitted(hessian[part, part], sums[part], grid, group, steps, values[part])
            grid.scale[group], became = found
            _move(part, became, hessian, sums, values, errors)
        if fit and steps.coarse:
            _sweep(part, hessian, sums, grid, values, errors)
            for scale in steps.beside(grid.scale[group]):
                became = _replaced(hessian, sums, grid, group, part, scale, values)
                _move(part, became, hessian, sums, values, errors)
        _sweep(part, hessian, sums, grid, values, errors)


def _sweep(
    part: slice,
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    values: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    """Move the codes of some columns, one column after another."""
    for j in range(part.start, part.stop):
        pivot = hessian[j, j]
        best = grid.nearest(values[j] + sums[j] / pivot, j)
        step = best - values[j]
        gain = step * (2 * sums[j] - pivot * step)
        became = torch.where(gain > 0, best, values[j]).unsqueeze(0)
        _move(slice(j, j + 1), became, hessian, sums, values, errors)


def _move(
    part: slice,
    became: torch.Tensor,
    hessian: torch.Tensor,
    sums: torch.Tensor,
    values: torch.Tensor,
    errors: torch.Tensor,
) -> None:
    step = became - values[part]
    values[part] = became
    errors[part] -= step
    sums -= hessian[:, part] @ step


def _replaced(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    group: int,
    part: slice,
    scale: torch.Tensor,
    values: torch.Tensor,
) -> torch.Tensor:
    """Give a group another scale, with new codes, in the rows that gain; return its values."""
    trial = replace(grid, scale=grid.scale.index_copy(0, torch.tensor([group]), scale[None]))
    sums, became = sums[part].clone(), values[part].clone()
    gain = torch.zeros_like(scale)
    columns = list(enumerate(range(part.start, part.stop)))
    for i, j in columns * _TRIES:
        pivot = hessian[j, j]
        best = trial.nearest(became[i] + sums[i] / pivot, j)
        step = best - became[i]
        gain += step * (2 * sums[i] - pivot * step)
        sums -= hessian[part, j].unsqueeze(1) * step
        became[i] = best
    better = (gain > 0) & (scale != grid.scale[group])
    grid.scale[group] = torch.where(better, scale, grid.scale[group])
    return torch.where(better, became, values[part])


def _fitted(
    hessian: torch.Tensor,
    sums: torch.Tensor,
    grid: Grid,
    group: int,
    steps: ScaleSteps,
    values: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scales of a group, (rows,), and its values with them, (columns, rows)."""
    scale = grid.scale[group]
    zero = 0.0 if grid.zero_point is None else grid.zero_point[group]
    codes = round_to_type(values / scale + zero, grid.args) - zero
    pull, curvature = (codes * sums).sum(0), (codes * (hessian @ codes)).sum(0)
    wanted = scale + pull / curvature
    usable = wanted.isfinite() & (wanted * scale > 0)
    moved = steps.nearest(torch.where(usable, wanted, scale))
    became = grid.held(codes * moved).float()
    step = became - values
    gain = (step * (2 * sums - hessian @ step)).sum(0)
    better = usable & (gain > 0)
    return torch.where(better, moved, scale), torch.where(better, became, values)


def _fit_wide(
    hessian: torch.Tensor,
    grid: Grid,
    steps: ScaleSteps,
    values: torch.Tensor,
    errors: torch.Tensor,
    columns: torch.Tensor,
) -> None:
    """Move the scale of a group that is wider than a block."""
    columns = columns.flatten()
    part = slice(int(columns[0]), int(columns[-1]) + 1)
    sums, group = hessian[part] @ errors, int(grid.group[part.start])
    found = _fitted(hessian[part, part], sums, grid, group, steps, values[part])
    grid.scale[group], became = found
    errors[part] -= became - values[part]
    values[part] = became
