"""Counts of values in bins, apart for tokens of different size.

The class of a token is the exponent of its peak, its largest magnitude: 2^class <= peak <
2^(class + 1). Each class has the bins of `kernels.bin_counts`, as wide as its tokens need, so the
bins of small tokens stay fine beside huge ones. Class and width depend on nothing else: counts are
exact integers, in whatever order tokens arrive and tables are joined.

    table: (rows, 2 + BINS) int64, sorted by its first two columns: number of the parameter, class,
           then the counts
"""

from __future__ import annotations

import torch

from steelyard.kernels.bin_counts import BINS, SMALLEST_EXPONENT, add_counts
from steelyard.kernels.range import range_of

__all__ = ["KEYS", "add_tokens", "joined_tables", "token_ranges", "width_exponents"]

KEYS = 2  # columns before the counts
_BITS = (BINS // 2).bit_length() - 1
_SMALLEST_CLASS = SMALLEST_EXPONENT + _BITS - 1


def width_exponents(table: torch.Tensor) -> torch.Tensor:
    """Return the e of each row, whose bins are 2^e wide."""
    return table[:, 1] + 1 - _BITS


def add_tokens(
    table: torch.Tensor | None,
    observed: torch.Tensor,
    group_dims: int = 1,
    ranges: tuple[torch.Tensor, torch.Tensor] | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Return a new table of the tokens of `table` and of `observed`.

    observed: (num_observations, *qparam_shape, group_size), all finite; one observation of one
              parameter is a token
    ranges:   `token_ranges(observed)`, if it is known
    """
    values = _by_token(observed, group_dims)
    low, high = token_ranges(observed, group_dims) if ranges is None else ranges
    classes = _classes(torch.maximum(-low, high))
    parts = [] if table is None else [table]
    for number in torch.unique(classes).tolist():
        chosen = classes == number  # (tokens, parameters)
        if len(values) == 1:  # a weight: each parameter has one token
            parts.append(_counted(values[:, chosen[0]], chosen[0].nonzero(), number, backend))
            continue
        for parameter in chosen.any(0).nonzero().flatten().tolist():
            tokens = chosen[:, parameter].nonzero().flatten()
            place = torch.tensor([[parameter]], device=values.device)
            one = values[:, parameter : parameter + 1]
            parts.append(_counted(one, place, number, backend, tokens))
    return _summed(torch.cat(parts))


def token_ranges(observed: torch.Tensor, group_dims: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Return minimum and maximum of each token, (tokens, parameters) each."""
    values = _by_token(observed, group_dims)
    low, high = range_of(values.reshape(1, -1, values.shape[-1]))
    return low.reshape(values.shape[:2]), high.reshape(values.shape[:2])


def _by_token(observed: torch.Tensor, group_dims: int) -> torch.Tensor:
    """Return a view or a copy of shape (tokens, parameters, group_size)."""
    values = observed.flatten(-group_dims)
    return values.reshape(len(values), -1, values.shape[-1])


def joined_tables(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the table of the tokens of both."""
    return _summed(torch.cat([first, second.to(first.device)]))


def _classes(peak: torch.Tensor) -> torch.Tensor:
    wide = peak if peak.dtype == torch.float64 else peak.float()
    exponent = torch.frexp(wide).exponent.long() - 1
    return torch.where(peak == 0, _SMALLEST_CLASS, exponent.clamp(min=_SMALLEST_CLASS))


def _counted(
    values: torch.Tensor,
    parameters: torch.Tensor,
    number: int,
    backend: str | None,
    tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the rows of tokens of one class.

    values:     (tokens, parameters, group_size)
    parameters: (parameters, 1) int64
    tokens:     (count,) int64, the tokens to count; all if None
    """
    histogram = torch.zeros(len(parameters), 1 + BINS, dtype=torch.int64, device=values.device)
    histogram[:, 0] = number + 1 - _BITS
    add_counts(values, histogram, 1, backend, tokens)
    histogram[:, 0] = number
    return torch.cat([parameters, histogram], 1)


def _summed(rows: torch.Tensor) -> torch.Tensor:
    """Add up the rows with the same parameter and class."""
    keys, place = torch.unique(rows[:, :KEYS], dim=0, return_inverse=True)
    counts = rows.new_zeros(len(keys), BINS).index_add_(0, place, rows[:, KEYS:])
    return torch.cat([keys, counts], 1)
