"""The values that each weight of a matrix can be stored as, given the scales of its groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from steelyard.errors import StrategyError
from steelyard.kernels.pack import E2M1, quantize_and_pack, quotient_dtype
from steelyard.kernels.rounding import minifloat, quantized_range, reconstruct
from steelyard.kernels.scale_blocks import block_of, blocks_in, group_count, has_groups

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["Grid"]


@dataclass(frozen=True)
class Grid:
    """Stored values as they are decoded: in fp32, then rounded to the type of the weight."""

    scale: torch.Tensor  # (groups, rows), fp32, divided by the global scale
    zero_point: torch.Tensor | None  # as scale; None where the type is symmetric
    group: torch.Tensor  # (columns,), int64: the group that each column belongs to
    args: QuantizationArgs
    dtype: torch.dtype  # of the weight
    divides_in_dtype: bool  # whether rounding to nearest does, as compressed-tensors does
    pack: Callable[[torch.Tensor], torch.Tensor]  # a weight (out, in) to its codes

    @classmethod
    def of(
        cls,
        weight: torch.Tensor,
        scale: torch.Tensor,
        zero_point: torch.Tensor | None,
        args: QuantizationArgs,
        global_scale: torch.Tensor | None,
        exact: bool,
        backend: str | None,
    ) -> Grid:
        """Expand the parameters of `Observer.get_qparams` to (groups, rows)."""
        rows, columns = weight.shape
        height, width = block_of(args, rows, columns)
        if has_groups(args):
            group_count(args, weight.shape)  # raises if groups do not divide the columns
        shape = blocks_in(rows, height), blocks_in(columns, width)

        def spread(t: torch.Tensor) -> torch.Tensor:
            if t.numel() != shape[0] * shape[1]:
                raise StrategyError(
                    f"strategy {args.strategy!r} needs {shape[0]} by {shape[1]} scales for a "
                    f"weight of {rows} by {columns}, got {tuple(t.shape)}"
                )
            per_row = t.detach().float().reshape(shape).repeat_interleave(height, 0)[:rows]
            return per_row.t().contiguous()

        def pack(x: torch.Tensor) -> torch.Tensor:
            return quantize_and_pack(
                x, scale, zero_point, args, global_scale, packed=False, exact=exact, backend=backend
            )

        effective = spread(scale) if global_scale is None else spread(scale) / global_scale
        return cls(
            effective,
            None if args.symmetric or zero_point is None else spread(zero_point),
            torch.arange(columns, device=weight.device) // width,
            args,
            weight.dtype,
            not exact and quotient_dtype(weight, scale, global_scale) == weight.dtype,
            pack,
        )

    def reordered(self, order: torch.Tensor) -> Grid:
        """Return the grid of a weight with its columns in another order."""
        return replace(self, group=self.group[order])

    def columns(self, part: slice) -> Grid:
        """Return the grid of some columns."""
        return replace(self, group=self.group[part])

    @property
    def movable(self) -> bool:
        """Whether each row has scales of its own, which can move with its codes."""
        return self.args.strategy in ("group", "tensor_group", "channel")

    def with_rows(
        self, scale: torch.Tensor, other: torch.Tensor, rows: torch.Tensor
    ) -> torch.Tensor:
        """Return `scale`, shaped as for `of`, with some rows taken from `other`, (rows, groups)."""
        if not self.movable:
            return scale
        chosen = other.to(scale.dtype).reshape(scale.shape)
        return torch.where(rows.reshape(-1, *[1] * (scale.ndim - 1)), chosen, scale)

    @property
    def tight(self) -> bool:
        """Whether codes are so close that a decoded value may pack to a neighbouring code.

        bf16 has 8 significant bits. Decoding rounds once and the division that recovers the code
        rounds again; with 7- or 8-bit integers that adds up to half a code or more.
        """
        low, high = quantized_range(self.args)
        return self.args.type == "int" and (high - low) * torch.finfo(self.dtype).eps >= 0.5

    def nearest(self, x: torch.Tensor, column: int) -> torch.Tensor:
        """Return the stored values nearest to x, (rows,), fp32, in one column.

        Where codes are tight, a value that would pack to another code is replaced by a neighbour
        that packs to its own, on the side of x if possible.
        """
        group = int(self.group[column])
        scale = self.scale[group]
        zero_point = None if self.zero_point is None else self.zero_point[group]
        if not self.tight:
            return self.held(reconstruct(x, scale, zero_point, self.args)).float()

        low, high = quantized_range(self.args)
        offset = torch.zeros_like(scale) if zero_point is None else zero_point

        def decode(codes: torch.Tensor) -> torch.Tensor:
            return self.held((codes - offset) * scale)

        def kept(codes: torch.Tensor) -> torch.Tensor:
            dtype = self.dtype if self.divides_in_dtype else torch.float32
            scaled = decode(codes).to(dtype) / scale.to(dtype) + offset.to(dtype)
            return scaled.clamp(low, high).round().float() == codes

        place = (x / scale + offset).clamp(low, high)
        codes = place.round()
        step = torch.where(place > codes, 1.0, -1.0)
        beside, opposite = (codes + step).clamp(low, high), (codes - step).clamp(low, high)
        fallback = torch.where(kept(beside), beside, torch.where(kept(opposite), opposite, codes))
        return decode(torch.where(kept(codes), codes, fallback)).float()

    def stored(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight as the file stores it, decoded; (out, in), in the weight's type."""
        codes = self.pack(weight)
        if codes.dtype == torch.uint8:  # two fp4 codes each
            table = torch.tensor([*E2M1, *(-v for v in E2M1)], device=codes.device)
            pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
            decoded = table[pairs.flatten(1).long()]
        else:
            decoded = codes.float()
        if self.zero_point is not None:
            decoded = decoded - self._wide(self.zero_point)
        return self.held(decoded * self._wide(self.scale))

    def round_to_nearest(self, weight: torch.Tensor) -> torch.Tensor:
        """Return `stored(weight)`, but keep weights whose decoded value packs to another code."""
        decoded = self.stored(weight)
        if not self._always_held():
            decoded = torch.where(self.stored(decoded) == decoded, decoded, weight)
        return decoded + 0.0  # turns -0.0 into 0.0

    def keeps(self, weight: torch.Tensor) -> torch.Tensor:
        """Return which rows of a decoded weight, (out, in), packing stores unchanged."""
        if self._always_held():
            return torch.ones(len(weight), dtype=torch.bool, device=weight.device)
        return (self.stored(weight) == weight).all(1)

    def _always_held(self) -> bool:
        """Whether every decoded value is sure to pack to the code that it came from.

        True where all are normal numbers of the weight's type, none overflows, and codes are not
        tight.
        """
        low, high = quantized_range(self.args)
        least = 1.0
        if self.args.type == "float":
            mantissa, min_exponent = minifloat(self.args.num_bits)
            least = 2.0 ** (min_exponent - mantissa)
        size, held = self.scale.abs(), torch.finfo(self.dtype)
        normal = float(size.min()) * least >= held.tiny
        return normal and (high - low) * float(size.max()) <= held.max and not self.tight

    def _wide(self, t: torch.Tensor) -> torch.Tensor:
        """Return one parameter per weight, (rows, columns)."""
        return t.t().index_select(1, self.group)

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """Round to the weight's type, saturating at its largest value."""
        limit = min(torch.finfo(self.dtype).max, torch.finfo(x.dtype).max)
        return x.clamp(-limit, limit).to(self.dtype)
