"""The range with the least error of all tokens, each weighed by its size.

The squared error of a value grows with its size, so a few tokens with huge values decide the range
of `histogram_mse`, and all other tokens pay for it. Relative to its token, the error of a huge
value counts no more than any other, and the range cuts it off, although all tokens may attend to
it. The error is divided by a power of the token's largest magnitude, its peak:

    cost = sum over tokens of sum of |x - reconstructed x|^norm / peak^(norm * relative)

A token below the median counts as one of the median's size: no range should grow fine for tokens
that are almost zero. Peaks are known to a factor of two (`kernels.token_bins`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from pydantic import Field
from torch import distributed as dist

from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.qparams import qparams_from_range
from steelyard.kernels.range_costs import errors_of
from steelyard.kernels.rounding import quantized_range
from steelyard.kernels.token_bins import KEYS, add_tokens, token_ranges, width_exponents
from steelyard.observers.base import Observer, reads_blocks
from steelyard.observers.combine import TOKEN_TABLE
from steelyard.observers.histogram_base import check_count
from steelyard.observers.observer_options import ActivationOptions

__all__ = ["TokenMSEObserver"]

_LOST = 0.25  # squared error over sum of squares of a token that is not served
_PER_OCTAVE, _OCTAVES = 8, 12  # candidates: the observed range times 2^(-k / 8)
_WIDER = 2.0 ** (torch.arange(1, _PER_OCTAVE) / _PER_OCTAVE)
"""Candidates of floating-point types besides. A range twice as large has the same codes, but those
between decide where codes fall: values that recur in all texts may be closer to one."""


class TokenMSEOptions(ActivationOptions):
    """Options of `token_mse`."""

    norm: float = Field(
        default=2.0, ge=1, le=8, description="power to which errors are raised, 1 to 8"
    )
    relative: float = Field(
        default=0.25,
        ge=0,
        le=1,
        description="0 judges errors as they are, 1 relative to the largest value of their token",
    )


@Observer.register("token_mse")
class TokenMSEObserver(Observer):
    """The range with the least squared error of all values, weighed by the size of their token.

    min_vals, max_vals: (*qparam_shape), of all values observed
    token_table:        (rows, 2 + BINS) int64, see `kernels.token_bins`
    """

    suits = "activations"
    Options = TokenMSEOptions

    _act_sync_dict: ClassVar = {
        "min_vals": dist.ReduceOp.MIN,
        "max_vals": dist.ReduceOp.MAX,
        "token_table": TOKEN_TABLE,
    }

    token_table: torch.Tensor
    _chosen: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] | None = None
    """A table, and the range that was chosen for it."""
    _ranges: tuple[torch.Tensor, torch.Tensor] | None = None
    """The range of each token of the value that is being observed."""

    def extremes(self, observed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        dims = self.group_dims(observed)
        low, high = self._ranges = token_ranges(observed, dims)
        shape = observed.shape[1:-dims]
        return low.amin(0).reshape(shape), high.amax(0).reshape(shape)

    @reads_blocks
    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        low, high = self.range_of(observed)
        check_count(self.label, low.numel())
        started = self.has_statistics
        before = self.token_table if started else None
        ranges, self._ranges = self._ranges, None
        self.token_table = add_tokens(before, observed, self.group_dims(observed), ranges)
        self.min_vals = torch.minimum(self.min_vals, low) if started else low
        self.max_vals = torch.maximum(self.max_vals, high) if started else high

    def chosen_range(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if global_scale is not None:
            return self._searched(global_scale)
        if self._chosen is None or self._chosen[0] is not self.token_table:
            # every update makes a new table; fused observers ask each other more than once
            self._chosen = (self.token_table, self._searched(None))
        return self._chosen[1]

    def _searched(self, global_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        low, high = (v.reshape(-1).cpu() for v in (self.min_vals, self.max_vals))
        low, high = low.clamp(max=0), high.clamp(min=0)
        table = self.token_table.cpu()
        found = [
            self._range_of(table[table[:, 0] == number], low[number], high[number], global_scale)
            for number in range(len(low))
        ]
        like = self.min_vals
        below, above = (torch.stack([each[i] for each in found]).to(like) for i in (0, 1))
        return below.reshape(like.shape), above.reshape(like.shape)

    def _range_of(
        self,
        rows: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the range of one parameter; rows: its part of the table."""
        shrunk = torch.exp2(-torch.arange(_PER_OCTAVE * _OCTAVES + 1) / _PER_OCTAVE)
        if self.args.type == "float":
            shrunk = torch.cat([shrunk[:1], _WIDER, shrunk[1:]])
        shrunk, largest = shrunk.to(low), torch.finfo(low.dtype).max
        if self.args.symmetric:
            high = torch.maximum(-low, high)
            trial = (high * shrunk).clamp(max=largest)
            best = int(self._costs(rows, -trial, trial, global_scale).argmin())
            return -trial[best], trial[best]
        ends = [(end * shrunk).clamp(-largest, largest) for end in (low, high)]
        costs = self._costs(rows, ends[0], ends[1], global_scale)
        best, least = int(costs.argmin()), float(costs.min())
        chosen, moved = [end[best] for end in ends], True
        while moved:  # one end at a time, until neither gains
            moved = False
            for side in (1, 0):
                trials = [each.expand_as(shrunk) for each in chosen]
                trials[side] = ends[side]
                costs = self._costs(rows, trials[0], trials[1], global_scale)
                if float(costs.min()) < least:
                    chosen[side], least = trials[side][int(costs.argmin())], float(costs.min())
                    moved = True
        return chosen[0], chosen[1]

    def _costs(
        self,
        rows: torch.Tensor,
        low: torch.Tensor,
        high: torch.Tensor,
        global_scale: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the cost of each candidate, (num_candidates,) fp64."""
        scale, zero_point = qparams_from_range(low, high, self.args, self.scale_dtype, global_scale)
        scale = scale.double().reshape(-1)
        if global_scale is not None:
            scale = scale / global_scale.double().cpu()
        candidates, norm = len(scale), float(self.options.norm)
        width = torch.exp2(width_exponents(rows).double())
        counts = rows[:, KEYS:].repeat_interleave(candidates, 0)  # the kernel stops at worse ones
        unit = (scale / width[:, None]).reshape(-1, 1)
        zeros = zero_point.double().reshape(-1).repeat(len(rows)).reshape(-1, 1)
        errors = errors_of(counts, unit, zeros, self.args, norm).reshape(len(rows), candidates)
        weights = (width * torch.exp2(-self.options.relative * _sizes(rows).double())) ** norm
        return (errors * weights[:, None]).sum(0)

    def unserved(self) -> str | None:
        """Say so if most tokens lose half of their norm, or those that the range cuts off do."""
        if self.args.strategy != "tensor" or not self.has_statistics:
            return None
        rows = self.token_table.cpu()
        tokens, size = rows[:, KEYS:].sum(-1).double(), rows[:, 1].double()
        found = self.get_qparams()
        scale, zero_point = (
            value.double().cpu().reshape(1) for value in (found["scale"], found["zero_point"])
        )
        low, high = quantized_range(self.args)
        levels = max(-low, high) if self.args.symmetric else high - low
        harmed = self._losses(rows, scale, zero_point) > _LOST
        beyond = torch.exp2(size) > scale * levels
        lost, cut = (float(tokens[each].sum() / tokens.sum()) for each in (harmed, harmed & beyond))
        if lost > 0.5:
            return f"{lost:.1%} of the tokens lose half of their norm or more"
        if cut:
            return f"the range cuts off half of the norm of {cut:.2%} of the tokens"
        return None

    def _losses(
        self, rows: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor
    ) -> torch.Tensor:
        """Return the squared error of each row over its sum of squares, (rows,)."""
        width = torch.exp2(width_exponents(rows).double())
        unit, zeros = (scale / width)[:, None], zero_point.expand(len(rows))[:, None]
        errors = errors_of(rows[:, KEYS:], unit, zeros, self.args, 2.0).reshape(-1)
        lower = torch.arange(-BINS // 2, BINS // 2, dtype=torch.float64)
        squares = rows[:, KEYS:].double() @ (lower.square() + lower + 1 / 3)
        return errors / squares

    def statistics_problem(self, tensors: Mapping[str, torch.Tensor]) -> str | None:
        if not tensors:
            return None
        table, high = tensors.get("token_table"), tensors.get("max_vals")
        if table is None or high is None:
            return "it has no table of tokens"
        if table.dtype != torch.int64 or table.ndim != 2 or table.shape[1] != KEYS + BINS:
            kind = str(table.dtype).removeprefix("torch.")
            return f"token_table is of type {kind} and shape {tuple(table.shape)}"
        if sorted(set(table[:, 0].tolist())) != list(range(high.numel())):
            return "token_table has other parameters than max_vals"
        if bool((table[:, 1].abs() > 1100).any()):
            return "token_table has tokens of an impossible size"
        if bool((table[:, KEYS:] < 0).any()) or not bool((table[:, KEYS:].sum(-1) > 0).all()):
            return "token_table has counts below zero, or none"
        return None


def _sizes(rows: torch.Tensor) -> torch.Tensor:
    """Return the class of each row, but at least that of the median token."""
    tokens = rows[:, KEYS:].sum(-1).cumsum(0)  # all tokens have as many values; rows are sorted
    median = rows[int((2 * tokens >= tokens[-1]).int().argmax()), 1]
    return rows[:, 1].clamp(min=median)
