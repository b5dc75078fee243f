"""Gradients of a loss on a model's logits, with one layer in memory at a time.

The samples run forward layer by layer, and the output of every layer is kept. From the gradient at
the last output, the layers then run in reverse order: each runs once more from its kept input, now
with autograd, which gives the gradients of its parameters and of its input.

Every sample is computed in one thread, and sums over samples are in their order, so the number of
threads does not change a bit.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, Parameter

from steelyard.distributed import ThreadPool
from steelyard.errors import PipelineError
from steelyard.model.activations import HiddenStates, fetched
from steelyard.model.batch_state import Batch, Call
from steelyard.model.layerwise import DTYPE, LayerwiseModel
from steelyard.model.placeholders import places_in, replaced
from steelyard.model.precision import computing_in
from steelyard.model.straight_through import straight_through_inputs

__all__ = ["LayerGradients", "Trace", "Wanted", "summed"]

Gradients = dict[str, torch.Tensor]
Seeds = dict[tuple[int, tuple[int | str, ...]], torch.Tensor]
"""Gradients with respect to tensors that layers return: (layer, path in its output) -> gradient."""


@dataclass(frozen=True)
class Wanted:
    """A parameter whose gradient is asked for.

    reduce: turns its gradient into the one that is kept, such as one value per scale
    """

    name: str
    parameter: Parameter
    reduce: Callable[[torch.Tensor], torch.Tensor]


Parameters = Callable[[Module, Sequence[Module]], AbstractContextManager[list[Wanted]]]
"""Replaces parameters within a module, but not within some others, and yields those wanted."""


@contextlib.contextmanager
def _unchanged(root: Module, without: Sequence[Module]) -> Iterator[list[Wanted]]:
    yield []


@dataclass
class Trace:
    """One sample: the arguments of its layers, once they are recorded, and kept outputs.

    needed: layers whose outputs the modules after the layers compute with
    """

    inputs: Mapping[str, torch.Tensor]
    calls: dict[int, Call] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    needed: set[int] = field(default_factory=set)

    def batch(self) -> Batch:
        return Batch(self.inputs, calls=dict(self.calls), needed=set(self.needed))

    @property
    def tokens(self) -> int:
        return self.inputs["input_ids"].numel()


class LayerGradients:
    """Runs a model forward and in reverse, layer by layer.

    parameters: the values to compute with in place of the files', and whose gradients are wanted
    """

    def __init__(
        self, model: LayerwiseModel, pool: ThreadPool, parameters: Parameters = _unchanged
    ) -> None:
        self.model = model
        self.pool = pool
        self.parameters = parameters

    @torch.no_grad()
    def forward(
        self,
        samples: Sequence[Trace],
        held: HiddenStates,
        every: bool,
        advance: Callable[[float], None],
    ) -> None:
        """Keep the outputs of layers: of all of them, or of those that the modules after need.

        advance: called after each layer, with the fraction of the work of all layers
        """
        sequence = self.model.sequence
        batches = [sample.batch() for sample in samples]
        sequence.held = held
        for sample in samples:
            sample.outputs.clear()
        for index in range(len(sequence)):
            with sequence:
                self.model.record(batches, index)
            called = [i for i, batch in enumerate(batches) if index in batch.calls]
            with self._layer(index, bool(called)):
                calls = [(i, functools.partial(sequence.run, index, batches[i])) for i in called]
                with contextlib.closing(self.pool.begin(calls)) as outputs:
                    for i, output in zip(called, outputs, strict=True):
                        sample, batch = samples[i], batches[i]
                        sample.calls[index] = batch.calls[index]
                        sequence.put(index, batch, output)
                        if every:
                            output = batch.outputs.get(index, output)
                            sample.outputs[index] = sequence.stored(output)
            advance(1 / len(sequence))
        for sample, batch in zip(samples, batches, strict=True):
            sample.outputs |= batch.outputs
            sample.needed = set(batch.needed)

    def backward(
        self,
        samples: Sequence[Trace],
        seeds: Sequence[Seeds],
        advance: Callable[[float], None],
    ) -> Gradients:
        """Return the gradients of the wanted parameters of all layers.

        samples: with the outputs of all layers
        seeds:   of each sample, the gradients at the outputs that the modules after the layers use;
                 those of earlier layers are added
        """
        sequence = self.model.sequence
        found: Gradients = {}
        for index in reversed(range(len(sequence))):
            reached = [
                i for i, seed in enumerate(seeds) if any(layer == index for layer, _ in seed)
            ]
            with self._layer(index, bool(reached)) as wanted:
                calls = [
                    (i, functools.partial(self._reverse, index, samples[i], seeds[i], wanted))
                    for i in reached
                ]
                with contextlib.closing(self.pool.begin(calls)) as gradients:
                    for each in gradients:
                        summed(found, each)
            advance(1 / len(sequence))
        return found

    def _reverse(
        self, index: int, sample: Trace, seeds: Seeds, wanted: Sequence[Wanted]
    ) -> Gradients:
        """Run a layer for a sample with autograd; add the gradients of its inputs to `seeds`."""
        call = sample.calls[index]
        outputs = {layer: replaced(sample.outputs[layer], _leaf) for layer in call.layers}
        with torch.enable_grad():
            output = self.model.sequence.run(
                index, Batch(sample.inputs, outputs, calls={index: call})
            )
        ends = [
            (tensor, seeds.pop((index, place)))
            for place, tensor in places_in(output)
            if (index, place) in seeds
        ]
        starts = {
            (layer, place): tensor
            for layer, each in outputs.items()
            for place, tensor in places_in(each)
            if tensor.requires_grad
        }
        given = [*(each.parameter for each in wanted), *starts.values()]
        if not given:
            return {}
        gradients = torch.autograd.grad(
            [tensor for tensor, _ in ends], given, [seed for _, seed in ends], allow_unused=True
        )
        found, inward = gradients[: len(wanted)], gradients[len(wanted) :]
        for place, gradient in zip(starts, inward, strict=True):
            if gradient is not None:
                seeds[place] = seeds[place] + gradient if place in seeds else gradient
        return _reduced(wanted, found)

    @contextlib.contextmanager
    def head(self) -> Iterator[list[Wanted]]:
        """Hold the modules after the layers in memory; yield their wanted parameters."""
        model, layers = self.model.source.model, list(self.model.sequence.modules)
        with (
            self.model.head(),
            straight_through_inputs(model),
            self.parameters(model, layers) as wanted,
        ):
            yield wanted

    def through_head(
        self,
        sample: Trace,
        wanted: Sequence[Wanted],
        loss: Callable[[torch.Tensor, slice], torch.Tensor],
        step: int,
    ) -> tuple[float, Seeds, Gradients]:
        """Return the loss of a sample, and its gradients at the layers and of `wanted`.

        loss: of logits, (1, positions, vocabulary), at these positions; summed over them
        step: positions at a time
        """
        outputs = {layer: replaced(sample.outputs[layer], _leaf) for layer in sample.needed}
        starts = {
            (layer, place): tensor
            for layer, each in outputs.items()
            for place, tensor in places_in(each)
            if tensor.requires_grad
        }
        given = [*(each.parameter for each in wanted), *starts.values()]
        seeds: Seeds = {}
        found: Gradients = {}
        total = 0.0
        for start in range(0, sample.tokens, step):
            positions = slice(start, min(start + step, sample.tokens))
            with torch.enable_grad():
                value = loss(self.model.logits(Batch(sample.inputs, outputs), positions), positions)
            total += float(value.detach())
            gradients = torch.autograd.grad(value, given, allow_unused=True)
            summed(found, _reduced(wanted, gradients[: len(wanted)]))
            for place, gradient in zip(starts, gradients[len(wanted) :], strict=True):
                if gradient is not None:
                    seeds[place] = seeds[place] + gradient if place in seeds else gradient
        return total, seeds, found

    @contextlib.contextmanager
    def _layer(self, index: int, used: bool) -> Iterator[list[Wanted]]:
        """Hold a layer in memory, if it is used."""
        sequence, source = self.model.sequence, self.model.source
        if not used:
            yield []
            return
        layer = sequence.layers[index]
        with (
            sequence,
            source.loaded(layer.module, layer.name),
            computing_in(layer.module, DTYPE),
            straight_through_inputs(layer.module),
            self.parameters(layer.module, ()) as wanted,
        ):
            yield wanted

    def require_gradients(self, sample: Trace) -> None:
        """Raise if gradients do not reach the layers of a sample that has run forward."""
        sequence = self.model.sequence
        last = max(sample.calls)
        between = sorted(sample.needed - {last})
        if sequence.is_stateful:
            reason = "its layers pass values to each other in an object that they change"
        elif between:
            reason = f"it computes with the output of {sequence.name(between[0])} between layers"
        else:
            return
        raise PipelineError(f"{self.model.label} cannot be differentiated layer by layer: {reason}")


def summed(total: Gradients, more: Gradients) -> None:
    """Add gradients to others, in place."""
    for name, gradient in more.items():
        total[name] = total[name] + gradient if name in total else gradient


def _reduced(wanted: Sequence[Wanted], found: Sequence[torch.Tensor | None]) -> Gradients:
    return {
        each.name: each.reduce(gradient)
        for each, gradient in zip(wanted, found, strict=True)
        if gradient is not None
    }


def _leaf(value: Any) -> Any:
    """Return a tensor that gradients end at."""
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return fetched(value).detach().requires_grad_()
    return value
