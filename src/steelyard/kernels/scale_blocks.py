"""Which values share a scale: a tensor, a row, a group of columns or a block; and whether they fit.

The one place that decides whether groups or blocks divide a weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from steelyard.errors import StrategyError

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["block_of", "blocks_in", "divides", "group_count", "has_groups", "scale_shape"]


def has_groups(args: QuantizationArgs) -> bool:
    """Whether each run of `group_size` values along the last dimension has a scale."""
    return args.strategy in ("group", "tensor_group")


def block_of(args: QuantizationArgs, rows: int, columns: int) -> tuple[int, int]:
    """Return how many rows and columns of a weight share one scale."""
    if args.strategy == "tensor":
        return rows, columns
    if args.strategy == "channel":
        return 1, columns
    if args.strategy == "block":
        height, width = args.block_structure
        return height, width
    if has_groups(args):
        return 1, args.group_size
    raise StrategyError(f"strategy {args.strategy!r} does not apply to weights")


def divides(size: int, length: int) -> bool:
    """Whether groups or blocks of `size` cover `length` without a remainder.

    >>> divides(128, 384), divides(128, 200)
    (True, False)
    """
    return size > 0 and length % size == 0


def blocks_in(length: int, size: int) -> int:
    """Return how many blocks cover `length`, counting a partial last one."""
    return -(-length // size)


def group_count(args: QuantizationArgs, shape: Sequence[int]) -> int:
    """Return how many groups the last dimension has; no format stores a partial one.

    >>> group_count(QuantizationArgs(strategy="group", group_size=128), (48, 384))
    3
    """
    size, columns = args.group_size or 0, shape[-1]
    if not divides(size, columns):
        raise StrategyError(
            f"a tensor of shape {tuple(shape)} does not divide into groups of {size}: choose a "
            f"group size that divides {columns}, or ignore the module"
        )
    return columns // size


def scale_shape(args: QuantizationArgs, shape: tuple[int, int]) -> tuple[int, ...]:
    """Return the shape of a weight's scale, given the weight's (out, in).

    ===================  ================
    tensor               (1,)
    channel              (out, 1)
    group, tensor_group  (out, in / g)
    block                (out / h, in / w), rounded up
    ===================  ================
    """
    rows, columns = shape
    if args.strategy == "tensor":
        return (1,)
    if args.strategy == "channel":
        return (rows, 1)
    if args.strategy == "block":
        height, width = args.block_structure
        return blocks_in(rows, height), blocks_in(columns, width)
    return rows, group_count(args, shape)
