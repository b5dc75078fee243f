"""The values that each weight of a matrix may take, given the scales of its groups."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.kernels.rounding import minifloat, quantized_range, reconstruct

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["Grid"]

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@dataclass(frozen=True)
class Grid:
    """Stored values as they are decoded: in fp32, then rounded to the type of the weight."""

    scale: torch.Tensor  # (groups, rows), fp32, divided by the global scale
    zero_point: torch.Tensor | None  # as scale; None where the type is symmetric
    group: torch.Tensor  # (columns,), int64: the group that each column belongs to
    args: QuantizationArgs
    dtype: torch.dtype  # of the weight

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        args: QuantizationArgs,
        global_scale: torch.Tensor | None,
    ) -> Grid:
        """Spread parameters as `Observer.get_qparams` returns them over the rows of a weight."""
        rows, columns = weight.shape
        height, width = _block(args, rows, columns)
        shape = (math.ceil(rows / height), math.ceil(columns / width))

        def spread(t: torch.Tensor) -> torch.Tensor:
            if t.numel() != shape[0] * shape[1]:
                raise StrategyError(
                    f"strategy {args.strategy!r} needs {shape[0]} by {shape[1]} scales for a "
                    f"weight of {rows} by {columns}, got {tuple(t.shape)}"
                )
            per_row = t.detach().float().reshape(shape).repeat_interleave(height, 0)[:rows]
            return per_row.t().contiguous()

        effective = spread(scale) if global_scale is None else spread(scale) / global_scale
        return cls(
            effective,
            None if args.symmetric or zero_point is None else spread(zero_point),
            torch.arange(columns, device=weight.device) // width,
            args,
            weight.dtype,
        )

    def reordered(self, order: torch.Tensor) -> Grid:
        """Return the grid of a weight whose columns are put in another order."""
        return replace(self, group=self.group[order])

    def columns(self, part: slice) -> Grid:
        """Return the grid of some columns."""
        return replace(self, group=self.group[part])

    def nearest(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the stored values nearest to x, (rows,), fp32; all of them in one column."""
        group = int(self.group[column])
        zero_point = None if self.zero_point is None else self.zero_point[group]
        return self._held(reconstruct(x, self.scale[group], zero_point, self.args)).float()

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the values, in the weight's type, of what `quantize_and_pack` stores unpacked.

        codes: (rows, columns), or (rows, columns / 2) of two fp4 codes each
        """
        if codes.dtype == torch.uint8:
            table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=codes.device)
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
            decoded = table[pairs.flatten(1).long()]
        else:
            decoded = codes.float()
        if self.zero_point is not None:
            decoded = decoded - self._wide(self.zero_point)
        return self._held(decoded * self._wide(self.scale))

    def always_held(self) -> bool:
        """Whether every value is a normal number of the weight's type, none of them too large.

        Values then pack to the codes that they came from: they are off by less than half a code.
        """
        low, high = quantized_range(self.args)
        least = 1.0
        if self.args.type == "float":
            mantissa, min_exponent = minifloat(self.args.num_bits)
            least = 2.0 ** (min_exponent - mantissa)
        size, type_info = self.scale.abs(), torch.finfo(self.dtype)
        largest = (high - low) * float(size.max())
        return float(size.min()) * least >= type_info.tiny and largest <= type_info.max

    def _wide(self, t: torch.Tensor) -> torch.Tensor:
        """Return one parameter per weight, (rows, columns)."""
        return t.t().index_select(1, self.group)

    def _held(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the weight's type; what is too large for it becomes its largest value."""
        limit = torch.finfo(self.dtype).max
        return x.clamp(-limit, limit).to(self.dtype)


def _block(args: QuantizationArgs, rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns share one scale."""
    if args.strategy == "tensor":
        return rows, columns
    if args.strategy == "channel":
        return 1, columns
    if args.strategy == "block":
        height, width = args.block_structure
        return height, width
    if args.strategy in ("group", "tensor_group") and columns % args.group_size == 0:
        return 1, args.group_size
    raise StrategyError(
        f"strategy {args.strategy!r} with group_size={args.group_size} does not fit a weight of "
        f"{columns} columns"
    )
