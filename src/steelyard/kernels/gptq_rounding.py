"""GPTQ: round a weight column by column, and let later columns make up for earlier errors.

The Hessian H is the second moment of the inputs. The output error of a row w that is stored as q is
e H e^T, where e = w - q. Let H = L L^T with L lower triangular. The error is then the squared
length of e L, and the j-th entry of that holds errors of column j and of those to the right of it,
no others:

    (e L)_j = L_jj e_j + s_j,    s_j = sum over i > j of e_i L_ij

So columns are rounded from the last to the first, each to the stored value that is nearest to
w_j + s_j / L_jj: that makes the entry as small as it can be. This is the whole algorithm. It is
the usual one, which takes every error off the columns that are still to come by means of the
Cholesky factor of H's inverse; but nothing is inverted here, and one factorisation does where that
takes three.

Matrices are (columns, rows) in here, so that a column of the weight is contiguous, and the columns
are in reverse: the column to be rounded first comes last.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.kernels import compiled_gptq
from steelyard.kernels.backend import use_compiled, use_triton
from steelyard.kernels.gptq_checks import check_problem
from steelyard.kernels.gptq_factor import Factor, LowerFactor, UpperFactor, factorise
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_loss import exact_losses, judge
from steelyard.kernels.gptq_refine import ScaleSteps, refine, refine_block

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["GPTQResult", "activation_order", "eliminate", "solve"]


@dataclass(frozen=True)
class GPTQResult:
    """A rounded weight, and how it was rounded."""

    weight: torch.Tensor
    """(out, in), decoded values in the weight's own type; packing them stores exactly these values.
    In rows that are rounded to nearest, a weight is kept unrounded where its decoded value would
    pack to another code: fp16 beyond 65504, or bf16 with integers of 7 and 8 bits. Pass the weight
    in fp32 to have every code."""
    scale: torch.Tensor
    """The scale of the weight, as given or as moved by refining."""
    loss: float
    """tr((W - Q) H (W - Q)^T), with H as it was given and W the target."""
    nearest_loss: float
    """The loss of rounding to nearest with the same scales; `loss` is never larger. Estimated from
    a sample of at least 256 rows, where there are 512 or more."""
    dampening_frac: float
    """Amount added to H's diagonal, as a fraction of the mean of its live columns."""
    dead_columns: int
    """Number of columns whose inputs were all zero. They are rounded to nearest and not set to
    zero: a served model may still get such inputs."""
    nearest_rows: int
    """Number of rows rounded to nearest."""
    fallback: str | None = None
    """Why GPTQ was skipped and all rows were rounded to nearest; None if it ran."""


def activation_order(hessian: torch.Tensor) -> torch.Tensor:
    """Return the columns by falling size of their inputs; (columns,), int64."""
    return torch.argsort(hessian.diagonal(), descending=True, stable=True)


def solve(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scale: torch.Tensor,
    zero_point: torch.Tensor | None,
    args: QuantizationArgs,
    global_scale: torch.Tensor | None = None,
    *,
    block_size: int = 128,
    dampening_frac: float = 0.01,
    order: torch.Tensor | None = None,
    g_idx: torch.Tensor | None = None,
    exact: bool = False,
    target: torch.Tensor | None = None,
    rounds: int = 0,
    backend: str | None = None,
) -> GPTQResult:
    """Round a weight so that its outputs change least, with scales that are given.

    weight:         (out, in), fp32, fp16 or bf16
    hessian:        (in, in), fp32, the sum of x^T x; a constant factor scales only the losses
    scale:          as `Observer.get_qparams` returns it; likewise zero_point and global_scale
    block_size:     columns between two large matrix products; affects speed only
    dampening_frac: added to H's diagonal, as a fraction of its mean; raised where H needs more
    order:          (in,), the columns in the order in which they are rounded; each keeps the scale
                    of its own group
    g_idx:          (in,), the group of each column, where a group's columns are not contiguous
    exact:          how rounding to nearest divides, as for `quantize_and_pack`
    target:         (out, in), fp32, the weight to approximate; `weight` itself if None
    rounds:         number of rounds that refine scales and codes afterwards (gptq_refine.py)
    """
    check_problem(weight, hessian, block_size, dampening_frac, order, g_idx, target)
    weight, hessian = weight.detach(), hessian.detach()
    if g_idx is not None:
        sizes = torch.bincount(g_idx.long())
        if bool((sizes != args.group_size).any()):
            raise StrategyError(
                f"g_idx must give each group {args.group_size} columns, got {sizes.tolist()}"
            )
        together = torch.argsort(g_idx, stable=True)
        apart = torch.argsort(together)
        result = solve(
            weight[:, together],
            hessian[together][:, together],
            scale,
            zero_point,
            args,
            global_scale,
            block_size=block_size,
            dampening_frac=dampening_frac,
            order=apart if order is None else apart[order],
            exact=exact,
            target=None if target is None else target[:, together],
            rounds=rounds,
            backend=backend,
        )
        return replace(result, weight=result.weight[:, apart])

    grid = Grid.of(weight, scale, zero_point, args, global_scale, exact, backend)
    native = use_compiled(weight, backend)
    blocks: tuple[Callable[..., None], Callable[..., None]] = (round_block, refine_block)
    if not native and use_triton(weight, backend):
        blocks = _triton_blocks()
    dead = int((hessian.diagonal() == 0).sum())
    result = GPTQResult(weight, scale, 0.0, 0.0, dampening_frac, dead, len(weight))
    if dead == len(hessian):
        reason = "no input has reached the layer"
        return replace(result, weight=grid.round_to_nearest(weight), fallback=reason)

    reverse = torch.arange(len(hessian), device=weight.device) if order is None else order
    reverse = reverse.flip(0)
    back = reverse.argsort()
    # divided by the mean, so that neither huge nor tiny inputs leave the range of fp32
    mean = float(hessian.diagonal().double().sum()) / (len(hessian) - dead)
    factor, added, frac = factorise(
        hessian, reverse, mean, dampening_frac, UpperFactor if native else LowerFactor
    )
    result = replace(result, dampening_frac=frac)
    reordered = compiled_gptq.columns if native else _reordered
    original = reordered(weight, reverse)
    nearest_errors, nearest_shift = (
        compiled_gptq.nearest_errors(original, added, grid.reordered(reverse))
        if native
        else _nearest_errors(weight, original, reverse, added, grid)
    )
    if target is not None:
        wanted = reordered(target.detach(), reverse)
        nearest_errors += wanted - original
        nearest_shift = _damping(nearest_errors, added)
        original = wanted
    if factor is None:
        loss = mean * float(exact_losses(nearest_errors[back], hessian, mean).sum())
        reason = f"the Hessian has no Cholesky factor, even with dampening_frac={frac:g}"
        rounded = grid.round_to_nearest(weight)
        return replace(result, weight=rounded, loss=loss, nearest_loss=loss, fallback=reason)

    values, losses = eliminate(
        original, factor, added, grid.reordered(reverse), block_size, blocks[0]
    )
    found, refined = grid, scale
    if rounds:
        damped = hessian / mean
        damped.diagonal().add_(added[back])
        steps = ScaleSteps.of(args, scale, global_scale)
        again, moved = refine(
            original.index_select(0, back),
            damped,
            grid,
            values.index_select(0, back),
            steps,
            rounds,
            None if native else blocks[1],
        )
        again = again.index_select(0, reverse)
        off = original - again
        refined_losses = factor.squared_lengths(off) - _damping(off, added)  # with the undamped H
        gains = refined_losses < losses
        values = torch.where(gains, again, values)
        losses = torch.where(gains, refined_losses, losses)
        refined = grid.with_rows(scale, steps.stored(moved.scale).t(), gains)
        found = Grid.of(weight, refined, zero_point, args, global_scale, exact, backend)
    rounded = values.to(weight.dtype).index_select(0, back).t().contiguous()
    rounded += 0.0  # turns -0.0 into 0.0
    better, loss, nearest_loss = judge(
        original,
        values,
        losses,
        nearest_errors,
        nearest_shift,
        factor,
        hessian,
        mean,
        back,
        refused=~found.keeps(rounded),
    )
    if not bool(better.all()):
        rounded = torch.where(better.unsqueeze(1), rounded, grid.round_to_nearest(weight))
        refined = grid.with_rows(scale, refined, better)
    return replace(
        result,
        weight=rounded,
        scale=refined,
        loss=loss,
        nearest_loss=nearest_loss,
        nearest_rows=int((~better).sum()),
    )


def eliminate(
    weight: torch.Tensor,
    factor: Factor,
    added: torch.Tensor,
    grid: Grid,
    block_size: int,
    run_block: Callable[..., None],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the rounded weight, (columns, rows), and e H e^T of each row, fp64.

    weight:    (columns, rows), fp32; the last column is rounded first
    factor:    of H + diag(added); the compiled one has its own kernel for all blocks
    run_block: `round_block`, or a kernel that does the same
    """
    if isinstance(factor, UpperFactor):
        return compiled_gptq.eliminate(weight, factor.upper, added, grid)
    assert isinstance(factor, LowerFactor)
    lower = factor.lower
    values, errors = torch.empty_like(weight), torch.empty_like(weight)
    losses = torch.zeros(weight.shape[1], dtype=torch.float64, device=weight.device)
    for stop in range(len(weight), 0, -block_size):
        block = slice(max(stop - block_size, 0), stop)
        sums = lower[stop:, block].t() @ errors[stop:]
        part = (weight[block], lower[block, block], sums, added[block], grid.columns(block))
        run_block(*part, values[block], errors[block], losses)
    return values, losses


def round_block(
    weight: torch.Tensor,
    lower: torch.Tensor,
    sums: torch.Tensor,
    added: torch.Tensor,
    grid: Grid,
    values: torch.Tensor,
    errors: torch.Tensor,
    losses: torch.Tensor,
) -> None:
    """Fill a block of `values` and `errors`; `sums` holds the terms of s_j from earlier blocks."""
    for j in reversed(range(len(weight))):
        s = sums[j] + lower[j + 1 :, j] @ errors[j + 1 :]
        values[j] = grid.nearest(weight[j] + s / lower[j, j], j)
        errors[j] = weight[j] - values[j]
        entry = lower[j, j] * errors[j] + s
        losses += entry.double().square() - added[j] * errors[j].double().square()


def _triton_blocks() -> tuple[Callable[..., None], Callable[..., None]]:
    from steelyard.kernels import triton_blocks

    return triton_blocks.gptq_block, triton_blocks.refine_block


def _nearest_errors(
    weight: torch.Tensor,
    original: torch.Tensor,
    reverse: torch.Tensor,
    added: torch.Tensor,
    grid: Grid,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the errors of rounding to nearest, and what dampening adds to their losses."""
    errors = original - _reordered(grid.stored(weight), reverse)
    return errors, _damping(errors, added)


def _damping(errors: torch.Tensor, added: torch.Tensor) -> torch.Tensor:
    """Return the losses that dampening adds, (rows,), fp64."""
    if use_compiled(errors):
        return compiled_gptq.vector_sums(errors, added)
    return (errors.square() * added.unsqueeze(1)).sum(0, dtype=torch.float64)


def _reordered(weight: torch.Tensor, reverse: torch.Tensor) -> torch.Tensor:
    """Return (out, in) as (columns, rows), fp32."""
    return weight.t().contiguous().index_select(0, reverse).float()
