"""Finds groups and blocks that do not divide a weight, whole or split, and sizes that do."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from compressed_tensors.quantization import QuantizationArgs

from steelyard.formats.tensor_parallel import split_of
from steelyard.kernels.scale_blocks import divides, has_groups
from steelyard.modifiers.schemes import has_free_groups

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan, Planned

__all__ = ["indivisible_blocks", "indivisible_groups", "indivisible_in_parallel"]

_SIZES = (128, 64, 32, 16)  # group sizes that servers support, largest first
_BYPASS = "; bypass_divisibility_checks applies to blocks, but no format stores part of a group"
_PARALLEL = (2, 4, 8)


def indivisible_groups(plan: Plan, bypass: bool) -> Iterator[str]:
    """Yield an error for each config group and width that the group size does not divide.

    compressed-tensors can neither store nor run part of a group, whatever a recipe bypasses.
    """
    for members in _by_config_group(plan):
        scheme = members[0].scheme
        for label, args in (("weight", scheme.weights), ("input", scheme.input_activations)):
            if args is None or not has_groups(args):
                continue
            size, widths = args.group_size or 1, sorted({p.shape[1] for p in members})
            for columns, who in _indivisible(members, size):
                yield (
                    f"{who}: {columns} columns cannot be cut into {label} groups of {size}; "
                    f"{_remedy(args, widths)}{_BYPASS if bypass else ''}"
                )


def indivisible_blocks(plan: Plan) -> Iterator[str]:
    """Yield the same for blocks; some servers accept partial blocks at the edge."""
    for members in _by_config_group(plan):
        weights = members[0].scheme.weights
        if weights is None or weights.strategy != "block":
            continue
        height, width = weights.block_structure
        for columns, who in _indivisible(members, width):
            yield (
                f"{who}: {columns} columns cannot be cut into blocks of {height} x "
                f"{width}; choose another block_structure, ignore them, or, if your server accepts "
                "partial blocks, set bypass_divisibility_checks"
            )


def indivisible_in_parallel(plan: Plan) -> Iterator[str]:
    """Yield one sentence for all layers that have the same name and the same problem."""
    alike: dict[tuple[str, str], list[str]] = {}
    for planned in plan.quantized:
        problem = _uneven_share(planned)
        if problem is not None:
            leaf = planned.name.rpartition(".")[2]
            alike.setdefault((leaf, problem), []).append(planned.name)
    for (leaf, problem), names in alike.items():
        others = f" ({len(names)} modules, such as {names[0]})" if len(names) > 1 else ""
        yield f"{leaf if others else names[0]}: {problem}{others}"


def _by_config_group(plan: Plan) -> Iterator[list[Planned]]:
    for name in dict.fromkeys(planned.group for planned in plan.quantized):
        members = [p for p in plan.quantized if p.group == name and 0 not in p.shape]
        if members:
            yield members


def _indivisible(members: list[Planned], size: int) -> Iterator[tuple[int, str]]:
    """Yield widths that `size` does not divide, with the number of modules and an example."""
    by_columns: dict[int, list[str]] = {}
    for planned in members:
        by_columns.setdefault(planned.shape[1], []).append(planned.name)
    for columns, names in by_columns.items():
        if not divides(size, columns):
            yield (
                columns,
                (names[0] if len(names) == 1 else f"{len(names)} modules such as {names[0]}"),
            )


def _remedy(args: QuantizationArgs, widths: list[int]) -> str:
    """Return sizes that divide the columns of every module of a config group."""
    if not has_free_groups(args):
        return "the format fixes this size: ignore them, or choose a scheme with other groups"
    listed = ", ".join(map(str, widths))
    fitting = [size for size in _SIZES if all(divides(size, columns) for columns in widths)]
    if not fitting:
        return (
            f"none of {', '.join(map(str, _SIZES))} divides {listed}: ignore them, or choose a "
            "scheme with strategy channel"
        )
    others = f" (or {', '.join(map(str, fitting[1:]))})" if fitting[1:] else ""
    return f"use group_size={fitting[0]}{others}, which divides {listed}, or ignore them"


def _uneven_share(planned: Planned) -> str | None:
    weights = planned.scheme.weights
    if weights is None:
        return None
    split = split_of(planned.name, weights, planned.shape)
    bad = [n for n in _PARALLEL if split.breaks(n)]
    if not bad:
        return None
    units = f"in units of {split.unit} " if split.unit > 1 else ""
    smaller = ", or choose a smaller group size" if split.by_input and weights.group_size else ""
    return (
        f"{split.size} {split.side} do not divide over {bad[0]} processes {units}under tensor "
        f"parallelism; serve it with fewer{smaller}"
    )
