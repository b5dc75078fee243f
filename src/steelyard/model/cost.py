"""Estimates the work of an evaluation in operations, for its progress bar and duration.

Steps are unequal: embedding a batch costs next to nothing, comparing two models over a vocabulary
costs much. Counted as equal, they would make the remaining time grow during a run.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch.nn import Module

__all__ = ["Costs", "estimate_seconds"]

_LOADED = 200  # operations that take as long as reading, decoding and casting one weight
_SCORED = 200  # and as comparing two logits in fp64
_REACHED = 0.5  # rate of a whole layer, relative to that of a large matrix product
_STEP = 2e-3  # fixed seconds per step
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Costs:
    """Operations of each step of one model.

    tokens: total over all samples
    """

    def __init__(self, model: Any, layers: Any, tokens: int) -> None:
        self.config = model.config.get_text_config()
        self.layers = layers
        self.tokens = tokens
        every = sum(p.numel() for p in model.parameters())
        inside = sum(p.numel() for layer in layers for p in layer.parameters())
        self.outside = _LOADED * (every - inside)

    def loading(self, index: int) -> float:
        """Return the cost of loading a layer."""
        return _LOADED * sum(float(p.numel()) for p in self.layers[index].parameters())

    def layer(self, index: int, tokens: int) -> float:
        """Return the cost of running tokens through a layer."""
        return 2.0 * tokens * _active_weights(self.layers[index], self.config)

    def scoring(self, tokens: int) -> float:
        """Return the cost of this model's half of a comparison."""
        return float(tokens * self.config.vocab_size * (2 * self.config.hidden_size + _SCORED / 2))

    def total(self) -> float:
        """Return the sum over all steps; modules outside the layers are loaded twice."""
        each = (self.loading(i) + self.layer(i, self.tokens) for i in range(len(self.layers)))
        return float(2 * self.outside + sum(each) + self.scoring(self.tokens))


def _active_weights(layer: Module, config: Any) -> float:
    """Return the number of weights active per token: of experts, only the routed ones."""
    chosen = getattr(config, "num_experts_per_tok", None)
    experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), None)
    share = chosen / experts if chosen and experts else 1.0
    return sum(
        p.numel() * (share if ".experts." in f".{name}" else 1.0)
        for name, p in layer.named_parameters()
    )


def estimate_seconds(operations: float, steps: int, width: int) -> float:
    """Estimate the time that operations take on this machine, from a short measurement.

    width: size of the matrices to measure with
    """
    width = min(max(width, 64), 4096)
    x, weight = torch.ones(256, width), torch.ones(width, width)
    x @ weight  # the first call of a kernel takes longer
    started, count = time.perf_counter(), 0
    while time.perf_counter() - started < 0.05:
        x @ weight
        count += 1
    rate = count * 2 * 256 * width * width / (time.perf_counter() - started)
    return operations / (_REACHED * rate) + steps * _STEP
