"""Combines statistics: of two observers, of the ranks of a run, of files.

`combine` is the only place that does. Each observer declares an operation for each of its
statistics (`_act_sync_dict`), one of these:

=====================  ======================================================================
`dist.ReduceOp.MIN`    smallest value
`dist.ReduceOp.MAX`    largest value
`dist.ReduceOp.SUM`    sum, in the order of the states
`dist.ReduceOp.AVG`    mean, weighted by the number of observations
`EXACT_SUM`            sum of bins (`kernels.exact_sum`); the order does not matter
`HISTOGRAM`            counts in bins (`kernels.bin_counts`); the order does not matter
`TOKEN_TABLE`          the same, apart for tokens of different size (`kernels.token_bins`)
`IN_ORDER`             concatenation along the first dimension, num_observations
not declared           value of the last state that has one
=====================  ======================================================================
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed as dist

from steelyard.errors import StatisticsError
from steelyard.kernels.bin_counts import joined
from steelyard.kernels.exact_sum import carried
from steelyard.kernels.token_bins import joined_tables

if TYPE_CHECKING:
    from steelyard.observers.base import Observer

__all__ = ["EXACT_SUM", "HISTOGRAM", "IN_ORDER", "TOKEN_TABLE", "State", "combine"]

EXACT_SUM = "exact sum"
HISTOGRAM = "histogram"
TOKEN_TABLE = "token table"
IN_ORDER = "in order"
_LAST = "last"

State = tuple[dict[str, Any], dict[str, torch.Tensor]]
"""Identity and counts of an observer (`observer_state.identity_of`), and its statistics."""

Tensors = list[torch.Tensor]

_OPERATIONS: dict[Any, Callable[[Tensors], torch.Tensor]] = {
    dist.ReduceOp.MIN: lambda values: reduce(torch.minimum, values),
    dist.ReduceOp.MAX: lambda values: reduce(torch.maximum, values),
    dist.ReduceOp.SUM: lambda values: reduce(torch.add, values),
    dist.ReduceOp.AVG: lambda values: reduce(torch.add, values),  # weighted before
    EXACT_SUM: lambda values: reduce(lambda a, b: carried(a + b), values),
    HISTOGRAM: lambda values: reduce(joined, values),
    TOKEN_TABLE: lambda values: reduce(joined_tables, values),
    IN_ORDER: torch.cat,
    _LAST: lambda values: values[-1],
}


def combine(observer: Observer, states: Sequence[State]) -> None:
    """Set the statistics of `observer` as if it had observed the values of all `states`, in order.

    This replaces its own statistics; pass its state among `states` to keep them. A failure changes
    nothing.
    """
    if observer.calculates and sum(bool(tensors) for _, tensors in states) > 1:
        raise not_mergeable(observer)
    counts = [int(about["updates"]) for about, _ in states]
    parts = [tensors for _, tensors in states]
    left_out = observer.recomputed_statistics() if len(states) > 1 else ()
    values = {
        name: _joined(observer, name, parts, counts)
        for name in observer.statistic_names()
        if name not in left_out and any(name in part for part in parts)
    }
    observer.combined(values, len(states))
    observer.num_updates = sum(counts)
    observer.num_observed_tokens = sum(int(about["tokens"]) for about, _ in states)
    dtypes = [about["dtype"] for about, _ in states if about["dtype"] is not None]
    observer.observed_dtype = getattr(torch, dtypes[-1]) if dtypes else None


def _joined(
    observer: Observer,
    name: str,
    parts: Sequence[Mapping[str, torch.Tensor]],
    counts: Sequence[int],
) -> torch.Tensor:
    operation = observer._act_sync_dict.get(name, _LAST)
    present = [
        (part[name], count) for part, count in zip(parts, counts, strict=True) if name in part
    ]
    values = [value.to(present[0][0].device) for value, _ in present]
    if len(values) == 1:
        return values[0]
    skipped = 1 if operation in (IN_ORDER, TOKEN_TABLE) else 0
    for value in values if operation != _LAST else ():
        mine, theirs = tuple(values[0].shape[skipped:]), tuple(value.shape[skipped:])
        if mine != theirs:
            raise StatisticsError(
                f"{observer.label}: {name} has shape {mine} on one side and {theirs} on the "
                "other: they observed different tensors"
            )
    if operation == dist.ReduceOp.AVG:
        total = max(sum(count for _, count in present), 1)
        values = [v * (count / total) for v, (_, count) in zip(values, present, strict=True)]
    return _OPERATIONS[operation](values)


def not_mergeable(observer: Observer) -> StatisticsError:
    return StatisticsError(
        f"{observer.label} defines only calculate_qparams, so its statistics from several ranks or "
        "files cannot be combined; define update_statistics_from_observed, or calibrate in one "
        "process"
    )
