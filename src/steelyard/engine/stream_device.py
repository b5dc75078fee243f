"""Decides where the weights of a stream are quantized: on the CPU, or on the accelerator.

A weight that goes through the device is copied there, and its codes back. That pays off where the
search for its scales is heavier than the transfer, which a short measurement tells.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from steelyard.distributed.packing import sendable
from steelyard.engine.stream import quantize
from steelyard.model.placement import CPU, Placement
from steelyard.plan.plan import Plan, Planned, search_time

__all__ = ["StreamDevice", "choose_device", "measured"]

_MARGIN = 2.0  # times faster; below, a busy machine could decide otherwise next time
_ROWS, _TRIES = 256, 3


@sendable
@dataclass(frozen=True)
class StreamDevice:
    """Where the weights of a stream are quantized.

    used:   whether that is the accelerator
    reason: what was measured, for the plan
    """

    used: bool = False
    reason: str = ""


def choose_device(plan: Plan, placement: Placement) -> StreamDevice:
    """Measure the heaviest search of a plan on both sides."""
    weighed = [planned for planned in plan.quantized if planned.scheme.weights is not None]
    if placement.is_host or not weighed:
        return StreamDevice()
    heaviest = max(weighed, key=lambda p: search_time(p) / (p.shape[0] * p.shape[1]))
    here, there = measured(heaviest, Placement()), measured(heaviest, placement)
    used = there * _MARGIN <= here
    rates = f"{there * 1e9:.3g} ns per weight there with its transfer, {here * 1e9:.3g} on the CPU"
    where = f"go through {placement.device}" if used else "are quantized on the CPU"
    return StreamDevice(used, f"weights {where}: {rates}")


def measured(planned: Planned, placement: Placement) -> float:
    """Return the seconds per weight that quantizing takes, with the transfer to the device."""
    rows, columns = min(planned.shape[0], _ROWS), planned.shape[1]
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(rows, columns, generator=generator).to(planned.dtype)
    part = replace(planned, shape=(rows, columns))

    def work() -> None:
        for tensors, _ in quantize([part], [placement.bring(weight)], {}):
            for tensor in tensors.values():
                tensor.to(CPU)

    work()  # compiles kernels
    return min(_seconds(work) for _ in range(_TRIES)) / weight.numel()


def _seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
