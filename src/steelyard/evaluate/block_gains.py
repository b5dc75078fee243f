"""What each block costs: the KL divergence that it would gain by the next larger scheme.

For each block there is a variant of the quantized model in which that block alone has the larger
scheme, rounded to nearest from the original's weights. All variants run in one walk over the
layers: the variant of a block starts there, from the state of the quantized model. So a block needs
one forward of each layer after it, and no layer is read twice.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms.as_stored import rounded_weights, with_scheme
from steelyard.evaluate.larger_scheme import larger_scheme
from steelyard.model.blocks import Batch
from steelyard.model.layerwise import LayerwiseModel

__all__ = ["EnlargedBlock", "Variants", "copied", "enlarged"]


@dataclass
class EnlargedBlock:
    """The quantized model with a larger scheme in one block."""

    index: int
    batches: list[Batch]


class Variants:
    """All variants of a quantized model, each run up to the same layer."""

    def __init__(self, base: LayerwiseModel, quantized: LayerwiseModel) -> None:
        self.base = base
        self.quantized = quantized
        self.all: list[EnlargedBlock] = []

    @torch.no_grad()
    def run(self, index: int, before: list[Batch]) -> None:
        """Run a layer, which both models have in memory.

        before: the batches of the quantized model, before this layer
        """
        sequence = self.quantized.sequence
        for variant in self.all:
            self._step(index, variant.batches)
        name, module = sequence.layers[index].name, sequence.modules[index]
        if not _quantized(module, name):
            return
        original = self.base.sequence.modules[index]
        started = EnlargedBlock(index, before)
        with enlarged(original, module, self.base.source.dtype):
            self._step(index, started.batches)
        self.all.append(started)

    def _step(self, index: int, batches: list[Batch]) -> None:
        sequence = self.quantized.sequence
        for batch in batches:
            if index in batch.calls:
                sequence.put(index, batch, sequence.run(index, batch))


def copied(batch: Batch) -> Batch:
    """Return a batch that continues on its own."""
    waiting = None if batch.waiting is None else set(batch.waiting)
    calls, needed = dict(batch.calls), set(batch.needed)
    return Batch(batch.inputs, dict(batch.outputs), calls, needed, waiting)


@contextlib.contextmanager
def enlarged(original: Module, quantized: Module, dtype: torch.dtype) -> Iterator[None]:
    """Give the modules of a layer the next larger scheme, with weights of the original's.

    dtype: that the original's weights are stored in
    """
    modules = _quantized(quantized, "")
    sources: dict[str, Any] = dict(original.named_modules())
    holders: dict[str, Module] = {}
    for name, module in modules.items():
        scheme = larger_scheme(module.quantization_scheme)
        holders[name] = with_scheme(scheme, tuple(module.weight.shape), dtype)
    stored = {name: sources[name].weight.data.to(dtype) for name in modules}
    with contextlib.ExitStack() as undo:
        for name, weight in rounded_weights(holders, stored, {}).items():
            module = modules[name]
            undo.callback(setattr, module.weight, "data", module.weight.data)
            undo.callback(setattr, module, "quantization_scheme", module.quantization_scheme)
            enabled = getattr(module, "quantization_enabled", True)
            undo.callback(setattr, module, "quantization_enabled", enabled)
            module.weight.data = weight
            scheme = getattr(holders[name], "quantization_scheme", None)
            if scheme is None:
                module.quantization_enabled = False
            else:
                module.quantization_scheme = scheme
        yield


def _quantized(layer: Module, prefix: str) -> dict[str, Any]:
    """Return the modules of a layer whose weights are quantized, by their names in it."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        scheme: Any = getattr(module, "quantization_scheme", None)
        if scheme is not None and scheme.weights is not None and "weight" in module._parameters:
            found[f"{prefix}.{name}".strip(".")] = module
    return found
