"""Repeats a run with half the batch size if the device runs out of memory."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch

from steelyard.distributed import Ranks
from steelyard.engine.result import Result
from steelyard.engine.run_options import Options
from steelyard.errors import PipelineError
from steelyard.words import count

__all__ = ["with_smaller_batches"]


def with_smaller_batches(options: Options, run: Callable[[Options, list[str]], Result]) -> Result:
    """Return the result of a run; halve its batch size as often as the device needs it.

    run: called with options, and notes on the sizes that did not fit
    """
    notes: list[str] = []
    while True:
        try:
            return run(options, notes)
        except torch.OutOfMemoryError as error:
            _check_smaller(options, error)
        gc.collect()  # the error held the tensors of the run
        size = options.batch_size // 2
        notes.append(
            f"the device ran out of memory with {_at_once(options)}; started over with "
            f"batch_size={size}: pass it to resume this run"
        )
        options = replace(options, batch_size=size, resume=False)


def _check_smaller(options: Options, error: torch.OutOfMemoryError) -> None:
    """Raise if a smaller batch is impossible, or each rank would choose its own."""
    said = " ".join(str(error).split()).partition(". ")[0]
    failed = f"out of memory on the device with {_at_once(options)} ({said})"
    remedy = f"use max_seq_length={max(options.sequence_length // 2, 1)}, or device='cpu'"
    if options.batch_size == 1:
        raise PipelineError(f"{failed}; {remedy}") from error
    if Ranks.current().count > 1 or isinstance(options.dataset, Iterator):
        smaller = options.batch_size // 2
        raise PipelineError(f"{failed}; use batch_size={smaller}") from error


def _at_once(options: Options) -> str:
    samples = count(options.batch_size, "sample")
    return f"{samples} of at most {options.sequence_length} tokens at a time"
