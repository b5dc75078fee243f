"""Estimates the most memory that a run takes on an accelerator, for the plan.

At a time the device holds one layer, or what is outside of layers, and the layer that was read
ahead; the hidden states that have room there; the statistics of the layer; the batches inside of
it; and what the search for the scales of one weight needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from steelyard.errors import PipelineError
from steelyard.kernels.backend import resolve, triton_device
from steelyard.model.stacks import model_layers

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan

__all__ = ["device_bytes"]

_REFERENCE, _KERNELS = 144, 16  # bytes per weight of a search: candidates in torch, or in registers
_CHUNK = 1 << 20  # weights that the reference searches at once
_COUNTERS = 3 << 19  # bytes of histograms and tables of a type, whatever the model


def device_bytes(plan: Plan, model: Any, device: torch.device, at_once: int, ranks: int = 1) -> int:
    """Return the bytes that a run takes on the device at most.

    at_once: tokens of one batch; 0 without data
    ranks:   of the run; the results and statistics of others arrive beside this one's
    """
    layers, outside = _weights(model)
    weights = max(2 * layers, outside) if not plan.whole else layers + outside
    states = min(plan.hidden_bytes, plan.room.device)
    widest = max((each for p in plan.quantized for each in p.shape), default=0)
    inside = 4 * at_once * (8 * plan.hidden + 4 * widest)
    tokens = 32 * plan.tokens  # ids, and masks of one kind
    largest = max((p.shape[0] * p.shape[1] for p in plan.quantized), default=0)
    plain = resolve() == "reference" or triton_device()[0] != device.type
    search = min(largest, _CHUNK) * _REFERENCE + 16 * largest if plain else _KERNELS * largest
    others = layers + plan.state_bytes if ranks > 1 else 0
    fixed = weights + states + plan.state_bytes + others + tokens + _COUNTERS
    return fixed + plan.waiting + inside + search


def _weights(model: Any) -> tuple[int, int]:
    """Return the bytes of the largest layer, and of everything outside of layers."""
    try:
        layers = [layer.module for layer in model_layers(model)]
    except PipelineError:
        layers = []
    each = [sum(p.nbytes for p in layer.parameters()) for layer in layers]
    return max(each, default=0), sum(p.nbytes for p in model.parameters()) - sum(each)
