"""A batch in parts, each with some of its samples, for a device that cannot hold the whole.

    parts = [part_of(batch, rows) for rows in row_ranges(8, 4)]
    output = joined([run(part) for part in parts])

The samples of a batch do not depend on each other. The tensors of a call that have one entry for
each sample are cut along that dimension; all others, such as a mask for all, are shared.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from steelyard.model.activations import fetched
from steelyard.model.batch_state import Batch, Call
from steelyard.model.placeholders import replaced

__all__ = ["joined", "part_of", "row_ranges", "samples_in"]


def samples_in(inputs: Mapping[str, torch.Tensor]) -> int:
    """Return how many samples of a batch can be separated; 1 if that is not clear.

    A batch that is as long as it is wide has dimensions that cannot be told apart.
    """
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2 or ids.shape[0] == ids.shape[1]:
        return 1
    return len(ids) if all(len(each) == len(ids) for each in inputs.values()) else 1


def row_ranges(rows: int, most: int) -> list[range]:
    """Return the rows of each part.

    >>> row_ranges(5, 2)
    [range(0, 2), range(2, 4), range(4, 5)]
    """
    return [range(start, min(start + most, rows)) for start in range(0, rows, most)]


def part_of(batch: Batch, rows: range) -> Batch:
    """Return some samples of a batch: inputs, outputs of layers, and recorded calls."""
    samples = len(batch.inputs["input_ids"])

    def cut(value: Any) -> Any:
        return _cut(value, samples, rows)

    return Batch(
        {name: cut(value) for name, value in batch.inputs.items()},
        {layer: replaced(output, cut) for layer, output in batch.outputs.items()},
        {
            layer: Call(replaced(call.args, cut), replaced(call.kwargs, cut), call.assumed)
            for layer, call in batch.calls.items()
        },
        set(batch.needed),
        None if batch.waiting is None else set(batch.waiting),
    )


def joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of a batch's parts as one; tensors are joined by their first dimension.

    >>> joined([(torch.zeros(2, 3), None), (torch.ones(1, 3), None)])[0].shape
    torch.Size([3, 3])
    """
    first = outputs[0]
    if len(outputs) == 1:
        return first
    if isinstance(first, torch.Tensor):
        return torch.cat([fetched(each) for each in outputs])
    if type(first) in (tuple, list):
        return type(first)(joined(each) for each in zip(*outputs, strict=True))
    if type(first) is dict:
        return {key: joined([each[key] for each in outputs]) for key in first}
    return first


def _cut(value: Any, samples: int, rows: range) -> Any:
    """Return the rows of a tensor with one entry for each sample; anything else as it is.

    The samples are the first dimension, or the second after positions of several kinds.
    """
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return value
    found = value
    if len(value) == samples:
        found = value[rows.start : rows.stop]
    elif value.ndim > 2 and len(value) > 1 and value.shape[1] == samples:
        found = value[:, rows.start : rows.stop]
    home = getattr(value, "_computed_on", None)
    if home is not None and found is not value:
        found._computed_on = home  # type: ignore[attr-defined]
    return found
