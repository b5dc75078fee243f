"""The shrink-grid search: the fraction of the observed range that quantizes with the least error.

For a group with range [min, max] the candidates are p * [min, max] with p = 1, 1 - 1/grid, ...,
1 - maxshrink. Each is turned into the scale and zero point that would be stored, and judged by

    sum_i importance_i * (|x_i - reconstruct(x_i)| / absmax) ** norm

Dividing by the group's largest magnitude changes no choice; it keeps the power from overflowing
or vanishing. The un-shrunk range comes first and is replaced only by a strictly smaller error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from steelyard.kernels.fast_search import fast_search
from steelyard.kernels.qparams import qparams_from_range
from steelyard.kernels.range import compute_dtype, range_of
from steelyard.kernels.rounding import reconstruct

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["candidate_errors", "first_best", "search_range", "shrink_factors"]

_CHUNK = 1 << 20  # elements worked on at once: memory follows this, not the tensor


def shrink_factors(maxshrink: float, grid: float) -> list[float]:
    """Return the fractions of the range to try, largest first; `maxshrink * grid` steps below 1.

    >>> shrink_factors(0.2, 10)
    [1.0, 0.9, 0.8]
    """
    steps = int(maxshrink * grid + 1e-6)  # 0.29 * 100 is 28.999...
    factors = [p for p in (1 - i / grid for i in range(steps + 1)) if p > 1e-6]
    if len(factors) < 2:
        raise ValueError(
            f"maxshrink={maxshrink} with grid={grid} leaves no candidate to search: "
            "maxshrink * grid must be at least 1, and grid more than 1"
        )
    return factors


def search_range(
    observed: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    norm: float,
    patience: int = 0,
    importance: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
    observed_range: tuple[torch.Tensor, torch.Tensor] | None = None,
    group_dims: int = 1,
    backend: str | None = None,
    in_place: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the range whose stored parameters reconstruct `observed` with the least error.

    observed:       (num_observations, *qparam_shape, group_size), any floating type
    group_dims:     2 where a group has rows and columns, (..., rows, columns)
    importance:     broadcasts to observed, not negative
    observed_range: `range_of(observed)`, where the caller has it
    in_place:       the result may reuse the memory of `observed_range`
    patience:       stop after this many steps in which no group of the tensor improved; 0: never
    returns:        min_vals, max_vals (*qparam_shape)
    """
    min_vals, max_vals = observed_range or range_of(observed, group_dims, backend)
    search = fast_search("search_range", observed, args, scale_dtype, backend)
    if search is not None:
        found: tuple[torch.Tensor, torch.Tensor] = search(
            observed,
            args,
            scale_dtype,
            factors,
            norm,
            patience,
            importance,
            global_scale,
            (min_vals, max_vals),
            group_dims,
            in_place or observed_range is None,
        )
        return found
    if group_dims == 2:
        importance = None if importance is None else importance.expand_as(observed).flatten(-2)
        observed = observed.flatten(-2)
    errors = candidate_errors(
        observed, min_vals, max_vals, args, scale_dtype, factors, norm, importance, global_scale
    )
    best = torch.tensor(factors, dtype=min_vals.dtype, device=min_vals.device)[
        first_best(errors, patience)
    ]
    return min_vals * best, max_vals * best


def candidate_errors(
    observed: torch.Tensor,
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    factors: Sequence[float],
    norm: float,
    importance: torch.Tensor | None = None,
    global_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the error of every candidate: (len(factors), *qparam_shape)."""
    dtype = compute_dtype(observed.dtype)
    count = min_vals.numel()
    values = observed.reshape(observed.shape[0], count, observed.shape[-1])
    weights = None if importance is None else importance.expand_as(observed).reshape_as(values)
    divisor = torch.maximum(min_vals.abs(), max_vals.abs()).reshape(1, count, 1)
    divisor = torch.where(divisor == 0, 1, divisor)
    candidates = [
        _effective_qparams(min_vals * p, max_vals * p, args, scale_dtype, global_scale)
        for p in factors
    ]
    errors = torch.zeros(len(factors), count, dtype=dtype, device=observed.device)
    for rows, groups, columns in _chunks(values.shape):
        x = values[rows, groups, columns].to(dtype)
        w = None if weights is None else weights[rows, groups, columns]
        for i, (scale, zero_point) in enumerate(candidates):
            zp = None if zero_point is None else zero_point[:, groups]
            error = reconstruct(x, scale[:, groups], zp, args).sub_(x).div_(divisor[:, groups])
            error = error.square_() if norm == 2 else error.abs_().pow_(norm)
            if w is not None:
                error = error.mul_(w)
            errors[i, groups] += error.sum(dim=(0, -1))
    return errors.reshape(len(factors), *min_vals.shape)


def first_best(errors: torch.Tensor, patience: int = 0) -> torch.Tensor:
    """Return, per parameter, the index of the first smallest error.

    errors: (num_candidates, *qparam_shape); NaN never wins
    """
    best = torch.zeros(errors.shape[1:], dtype=torch.long, device=errors.device)
    best_error = torch.nan_to_num(errors[0], nan=float("inf"), posinf=float("inf"))
    idle = 0
    for i in range(1, len(errors)):
        improved = errors[i] < best_error
        best = torch.where(improved, i, best)
        best_error = torch.where(improved, errors[i], best_error)
        if patience > 0:
            idle = 0 if bool(improved.any()) else idle + 1
            if idle >= patience:
                break
    return best


def _effective_qparams(
    min_vals: torch.Tensor,
    max_vals: torch.Tensor,
    args: QuantizationArgs,
    scale_dtype: torch.dtype,
    global_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Stored parameters, widened and shaped (1, num_qparams, 1) for `reconstruct`."""
    scale, zero_point = qparams_from_range(
        min_vals, max_vals, args, scale_dtype, global_scale, "reference"
    )
    scale = scale.to(min_vals.dtype)
    if global_scale is not None:
        scale = scale / global_scale
    zp = None if args.symmetric else zero_point.to(min_vals.dtype).reshape(1, -1, 1)
    return scale.reshape(1, -1, 1), zp


def _chunks(shape: Sequence[int]) -> Iterator[tuple[slice, slice, slice]]:
    """Cut (num_observations, num_qparams, group_size) into blocks of about `_CHUNK` elements."""
    rows, groups, columns = shape
    column_step = min(columns, _CHUNK)
    row_step = min(rows, max(1, _CHUNK // column_step))
    group_step = max(1, _CHUNK // (column_step * row_step))
    for g in range(0, groups, group_step):
        for r in range(0, rows, row_step):
            for c in range(0, columns, column_step):
                yield (
                    slice(r, r + row_step),
                    slice(g, g + group_step),
                    slice(c, c + column_step),
                )
