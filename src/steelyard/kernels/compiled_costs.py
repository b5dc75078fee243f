"""The compiled costs of ranges behind the signatures of `kernels.range_costs`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from steelyard.kernels.backend import instruction_set
from steelyard.kernels.compiled import format_of, native

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["divergences", "errors_of"]


def errors_of(
    counts: torch.Tensor,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    norm: float,
) -> torch.Tensor:
    return _range_costs(counts, unit, zero_point, args, (None, None), norm)


def divergences(
    counts: torch.Tensor,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    ends: torch.Tensor,
    args: QuantizationArgs,
) -> torch.Tensor:
    return _range_costs(counts, unit, zero_point, args, (ends[0], ends[1]), 2.0)


def _range_costs(
    counts: torch.Tensor,
    unit: torch.Tensor,
    zero_point: torch.Tensor,
    args: QuantizationArgs,
    ends: tuple[torch.Tensor, torch.Tensor] | tuple[None, None],
    norm: float,
) -> torch.Tensor:
    costs = torch.empty_like(unit, memory_format=torch.contiguous_format)
    described = format_of(args, torch.float32)  # scales are given as numbers
    native().range_costs(
        counts.contiguous(),
        described,
        unit.contiguous(),
        zero_point.contiguous(),
        *ends,
        norm,
        costs,
        instruction_set(),
        torch.get_num_threads(),
    )
    return costs
