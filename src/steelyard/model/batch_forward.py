"""Runs batches through a layer, in parts once the device has run out of memory.

A batch that does not fit is cut in half, and so are the batches after it. Everything computed until
then stays: the run goes on with the batch that it was at.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.nn import Module

from steelyard.errors import PipelineError
from steelyard.model.batch_parts import joined, part_of, row_ranges, samples_in
from steelyard.model.batch_state import Batch
from steelyard.model.blocks import LayerSequence
from steelyard.words import count

__all__ = [
    "BatchForward",
    "BatchLimit",
    "first_sample",
    "halve",
    "note_alone",
    "parts_of",
    "run_in_parts",
    "with_first_part",
]

T = TypeVar("T")


@dataclass
class BatchLimit:
    """Most samples to run at a time; halved when the device runs out of memory.

    notes: receives a sentence each time
    """

    notes: list[str] = field(default_factory=list)
    most: int = sys.maxsize

    def lower(self, forward: BatchForward, error: torch.OutOfMemoryError) -> None:
        """Halve the samples of a forward that did not fit; raise if it has only one."""
        rows, length = forward.batch.inputs["input_ids"].shape
        where = forward.sequence.name(forward.index)
        failed = f"{count(rows, 'sample')} of {count(length, 'token')} at a time"
        if rows == 1:
            said = " ".join(str(error).split()).partition(". ")[0]
            raise PipelineError(
                f"{where}: out of memory on the device with {failed} ({said}); use "
                f"max_seq_length={max(length // 2, 1)}, or device='cpu'"
            ) from error
        self.most = min(self.most, rows // 2)
        self.notes.append(
            f"{where}: the device ran out of memory with {failed}; the run went on with "
            f"{self.most}: batch_size={self.most} avoids it"
        )


@dataclass(frozen=True)
class BatchForward:
    """Runs one batch through a layer, each time that it is called."""

    sequence: LayerSequence
    index: int
    batch: Batch
    limit: BatchLimit

    def __call__(self, module: Module | None = None) -> Any:
        """Return the output of the layer.

        module: a copy of the layer to run instead
        """
        return self.sequence.run(self.index, self.batch, module)

    @property
    def samples(self) -> int:
        """Number of samples that can be separated; layers may share an object that they modify."""
        return 1 if self.sequence.is_stateful else samples_in(self.batch.inputs)

    def parts(self) -> list[BatchForward]:
        """Return forwards of at most as many samples as the limit says."""
        if self.samples <= self.limit.most:
            return [self]
        ranges = row_ranges(self.samples, self.limit.most)
        cut = (part_of(self.batch, rows) for rows in ranges)
        return [BatchForward(self.sequence, self.index, part, self.limit) for part in cut]


def parts_of(forward: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return forwards that fit into the limit, in place of one; itself if it is no batch's."""
    if isinstance(forward, functools.partial):
        return [functools.partial(part, *forward.args) for part in parts_of(forward.func)]
    return list(forward.parts()) if isinstance(forward, BatchForward) else [forward]


def first_sample(forward: Callable[[], Any]) -> Callable[[], Any]:
    """Return a forward of the first sample of a batch; itself if it cannot be separated."""
    found = _batch_forward(forward)
    if found is None or found.samples < 2:
        return forward
    part = part_of(found.batch, range(1))
    return BatchForward(found.sequence, found.index, part, found.limit)


def halve(forwards: Iterable[Callable[..., Any]], error: torch.OutOfMemoryError) -> None:
    """Lower the limit after one of some forwards did not fit; raise if nothing can be halved."""
    traceback.clear_frames(error.__traceback__)  # which hold the tensors of the forward
    batches = [found for each in forwards if (found := _batch_forward(each)) is not None]
    largest = max(batches, key=lambda each: each.samples, default=None)
    if largest is None or largest.samples < len(largest.batch.inputs.get("input_ids", ())):
        raise error
    largest.limit.lower(largest, error)


def note_alone(forwards: Iterable[Callable[..., Any]]) -> None:
    """Note that the samples of a batch are observed one after another, not together."""
    for found in filter(None, map(_batch_forward, forwards)):
        where = found.sequence.name(found.index)
        note = f"{where}: the device cannot hold the samples of a batch together; each is observed "
        found.limit.notes.append(f"{note}on its own, and a moving average counts it as a batch")
        return


def run_in_parts(forward: Callable[[], Any]) -> Any:
    """Return the output of a batch, run in halves if the device runs out of memory."""
    while True:
        parts = parts_of(forward)
        try:
            return joined([part() for part in parts])
        except torch.OutOfMemoryError as error:
            halve(parts, error)


def with_first_part(
    use: Callable[[Callable[[], Any], int], T], forward: Callable[[], Any], tokens: int
) -> T:
    """Return `use(forward, tokens)`, with the first part of the batch if the whole does not fit."""
    while True:
        parts = parts_of(forward)
        samples = [1 if (each := _batch_forward(part)) is None else each.samples for part in parts]
        try:
            return use(parts[0], tokens * samples[0] // sum(samples))
        except torch.OutOfMemoryError as error:
            halve(parts[:1], error)


def _batch_forward(forward: Callable[..., Any]) -> BatchForward | None:
    inner = forward.func if isinstance(forward, functools.partial) else forward
    return inner if isinstance(inner, BatchForward) else None
