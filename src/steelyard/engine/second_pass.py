"""Runs the batches of a solved block again, for the input of the next block; tunes it before."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from steelyard.algorithms import ModuleResult
from steelyard.distributed import ThreadPool
from steelyard.engine.parts import Flow, Part
from steelyard.engine.showing import Stage
from steelyard.engine.solving import Solver
from steelyard.model.batch_forward import run_in_parts
from steelyard.model.placeholders import first_tensor
from steelyard.model.precision import computing_in, rounded_once
from steelyard.observers.lifecycle import with_schemes

__all__ = ["hold_rounded", "run_again", "tuned"]


def run_again(part: Part, flow: Flow, pool: ThreadPool, dtype: torch.dtype | None) -> None:
    """Collect the outputs of a block that is solved, or has nothing to quantize.

    dtype: the type to compute in; None for that of the model
    """
    if flow.collect is None:
        return
    modules = with_schemes(part.root, part.name, part.without).values()
    calls = [functools.partial(run_in_parts, forward) for forward in flow.forwards]
    with (
        computing_in(part.root, dtype, scales=True),
        rounded_once(modules),
        contextlib.closing(pool.begin(enumerate(calls))) as outputs,
    ):
        flow.collect(outputs)


def hold_rounded(
    held: contextlib.ExitStack, dtype: torch.dtype | None, stages: Iterable[Stage]
) -> None:
    """Hold only the rounded weights of these stages, which batches run through once more."""
    held.close()
    for stage in stages:
        held.enter_context(rounded_once(stage.modules.values(), dtype))


def tuned(
    solver: Solver,
    part: Part,
    flow: Flow,
    found: Mapping[str, ModuleResult],
    dtype: torch.dtype | None,
) -> dict[str, ModuleResult]:
    """Let the algorithms that tune change a block whose modules are all solved.

    Quantized modules keep their type in the meantime, so that the algorithm can replace tensors.
    """
    modules = with_schemes(part.root, part.name, part.without)
    block = solver.block(
        part.name,
        part.root,
        part.without,
        None,
        forwards=[functools.partial(_first, run) for run in flow.forwards],
        originals=part.originals,
        numbers=[number for number, _ in flow.places],
        padding=flow.padding,
        advance=flow.advance,
    )
    weighed = [each for each in modules.values() if "weight" in each._parameters]
    others = [each for each in modules.values() if each not in weighed]  # scales of a KV cache
    with contextlib.ExitStack() as casts:
        casts.enter_context(computing_in(part.root, dtype, without=modules.values()))
        for each in others:
            casts.enter_context(computing_in(each, dtype, scales=True, without=weighed))
        return solver.tune(block, modules, found)


def _first(forward: Callable[[], Any]) -> torch.Tensor:
    found: torch.Tensor = first_tensor(forward())
    return found
