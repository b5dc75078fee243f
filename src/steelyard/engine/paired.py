"""Runs each batch twice at a time: as in the unquantized model, and as in the quantized one.

The batch of the unquantized model runs through a copy of the block and comes first, so that its
input of a stage is known when the quantized batch reaches the stage.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch

from steelyard.distributed import ThreadPool
from steelyard.engine.parts import Flow, Part
from steelyard.engine.showing import Stage
from steelyard.engine.stages import Staged
from steelyard.engine.unquantized_copy import can_be_copied, unquantized_copy
from steelyard.model.batch_forward import run_in_parts
from steelyard.model.placement import holding_budget
from steelyard.model.precision import computing_in

__all__ = ["paired", "pairs", "quantized", "with_originals"]


@contextlib.contextmanager
def paired(
    part: Part,
    flow: Flow,
    stages: Sequence[Stage],
    pool: ThreadPool,
    dtype: torch.dtype | None,
    device: torch.device,
) -> Iterator[Staged[Any]]:
    """Drive the batches of a flow through stages, and its originals if it has any.

    dtype: the type to compute in; None for that of the model
    """
    called = [stage.called for stage in stages]
    budget = holding_budget(device)
    if not flow.originals:
        with Staged(called, flow.forwards, flow.tokens, budget, pool) as staged:
            yield staged
        return
    root, modules = unquantized_copy(part.root, [m for stage in called for m in stage])
    each = iter(modules)
    copies = [[next(each) for _ in stage] for stage in called]
    originals = [functools.partial(run, root) for run in flow.originals]
    forwards = [run for pair in zip(originals, flow.forwards, strict=True) for run in pair]
    tokens = [count for count in flow.tokens for _ in range(2)]
    with (
        contextlib.ExitStack() as cast,
        Staged(called, forwards, tokens, budget, pool, copies) as staged,
    ):
        for module in modules:
            cast.enter_context(computing_in(module, dtype))
        yield staged


def pairs(
    part: Part,
    flow: Flow,
    stages: Sequence[Stage] | None,
    pool: ThreadPool,
    dtype: torch.dtype | None,
) -> Flow:
    """Return a flow whose originals can run beside its batches; others run now, and are left out.

    stages: None if the modules of the part are not solved in stages
    """
    modules = [module for stage in stages or () for module in stage.called]
    if not flow.originals or (stages is not None and can_be_copied(part.root, modules)):
        return flow
    calls = (
        functools.partial(run_in_parts, functools.partial(run, part.root)) for run in flow.originals
    )
    with computing_in(part.root, dtype), contextlib.closing(pool.begin(enumerate(calls))) as found:
        for index, output in enumerate(found):
            flow.put_original(index, output)
    return replace(flow, originals=())


def with_originals(see: Callable[[int, Any, Any], None]) -> Callable[[int, Any], None]:
    """Return a `see` for pairs: the original of a batch, and then the batch."""
    originals: dict[int, list[Any]] = {}  # of the parts of a batch, in order

    def see_one(index: int, x: Any) -> None:
        batch, is_quantized = divmod(index, 2)
        if is_quantized:
            see(batch, x, originals[batch].pop(0))
        else:
            originals.setdefault(batch, []).append(x)

    return see_one


def quantized(outputs: Iterator[Any], flow: Flow) -> Iterator[Any]:
    """Yield the outputs of the quantized model; those of the original go to `put_original`."""
    if not flow.originals:
        yield from outputs
        return
    for index, output in enumerate(outputs):
        batch, is_quantized = divmod(index, 2)
        if is_quantized:
            yield output
        else:
            flow.put_original(batch, output)
