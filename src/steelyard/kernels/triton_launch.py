"""How Triton's kernels see a tensor, and how they are launched.

A kernel reads the view that the compiled ones read, (observations, two of parameters, rows and
columns of a group), without a copy. The members of a group are `lines` of `columns`; tiles of a
power of two members cut both. Tile sizes follow from the shape alone, so that every GPU adds in the
same order and finds the same result.
"""
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators, allow-untyped-calls

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from steelyard.kernels.compiled import five_dimensions

__all__ = ["Members", "group_offsets", "launch", "member_offsets", "next_power", "power_of"]


class Members(NamedTuple):
    """The groups of a tensor and the strides to their members, in the order of kernel arguments."""

    groups: int
    per_row: int  # groups along the last dimension of parameters
    lines: int
    rows: int  # lines of an observation
    columns: int
    observation_stride: int
    outer_stride: int
    inner_stride: int
    row_stride: int
    column_stride: int

    @classmethod
    def of(
        cls, observed: torch.Tensor, group_dims: int = 1, weights: torch.Tensor | None = None
    ) -> tuple[Members, torch.Tensor, tuple[int, ...], torch.Tensor | None]:
        """Return the members of a tensor and its view; strides and view of weights like it."""
        view = five_dimensions(observed, group_dims)
        n, outer, inner, rows, columns = view.shape
        strides = view.stride()
        wide = None
        weight_strides: tuple[int, ...] = (0, 0, 0, 0, 0)
        if weights is not None:
            wide = five_dimensions(weights.to(torch.float32), group_dims, observed).expand_as(view)
            weight_strides = wide.stride()
        both = [strides] if wide is None else [strides, weight_strides]
        if rows > 1 and all(s[3] == columns * s[4] for s in both):
            rows, columns = 1, columns * rows
        if n > 1 and rows == 1 and all(s[0] == columns * s[4] for s in both):
            n, columns = 1, columns * n
        members = cls(outer * inner, inner, n * rows, rows, columns, *strides)
        return members, view, weight_strides, wide

    def tile(self, most: int) -> tuple[int, int]:
        """Return the members of a tile, at most `most`, and its columns; powers of two."""
        columns = min(next_power(self.columns), most)
        return columns * min(next_power(self.lines), most // columns), columns

    def tiles(self, tile: tuple[int, int]) -> int:
        """Return the number of tiles of a group."""
        members, columns = tile
        return -(-self.lines // (members // columns)) * -(-self.columns // columns)


def next_power(number: int) -> int:
    """Return the least power of two that is not below a number.

    >>> next_power(96)
    128
    """
    return 1 << max(number - 1, 0).bit_length()


def power_of(norm: float) -> int:
    """Return the norm where kernels multiply instead of raising to a power, else 0."""
    return int(norm) if norm in (1.0, 2.0, 3.0) else 0


def launch(
    kernel: Any,
    grid: tuple[int, ...],
    on: torch.Tensor,
    *arguments: Any,
    num_warps: int,
    **blocks: Any,
) -> None:
    """Run a kernel on the device of `on`, with every operation rounded by itself."""
    with _device_of(on):
        kernel[grid](*arguments, **blocks, num_warps=num_warps, enable_fp_fusion=False)


def _device_of(tensor: torch.Tensor) -> AbstractContextManager[Any]:
    if tensor.device.type == "cpu":  # interpreted
        return nullcontext()
    interface = triton.runtime.driver.active.get_device_interface()
    context: AbstractContextManager[Any] = interface.device(tensor.device)
    return context


@triton.jit
def group_offsets(group, per_row, outer_stride, inner_stride):
    """Return where each group begins."""
    return (group // per_row).to(tl.int64) * outer_stride + (group % per_row) * inner_stride


@triton.jit
def member_offsets(
    tile,
    lines,
    rows,
    columns,
    observation_stride,
    row_stride,
    column_stride,
    TILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
):
    """Return where the members of a tile are, from the beginning of a group, and which exist."""
    across = tl.cdiv(columns, TILE_COLUMNS)
    member = tl.arange(0, TILE)
    line = (tile // across) * (TILE // TILE_COLUMNS) + member // TILE_COLUMNS
    column = (tile % across) * TILE_COLUMNS + member % TILE_COLUMNS
    offset = (line // rows).to(tl.int64) * observation_stride + (line % rows) * row_stride
    return offset + column.to(tl.int64) * column_stride, (line < lines) & (column < columns)
