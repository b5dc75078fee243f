"""Runs random tokens through one layer at a time, as it is and with tensors replaced.

A rotation needs no calibration data, but a look at how each kind of layer computes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms.block import Block
from steelyard.algorithms.pair_check import replaced_tensors
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.placeholders import filled, first_tensor, replaced
from steelyard.model.precision import computing_in
from steelyard.model.source import Source

__all__ = ["LayerProbe", "Probes"]

_TOKENS = 16


class LayerProbe:
    """One layer with its weights in memory, or the modules outside of layers, in fp32.

    hidden: the hidden state that goes in
    output: what comes out of it
    """

    def __init__(
        self, block: Block, hidden: torch.Tensor, run: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.block = block
        self.hidden = hidden
        self._run = run
        self.output = run(hidden)

    def run(
        self, changed: Mapping[str, torch.Tensor], hidden: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the output with tensors replaced, and with another hidden state."""
        with replaced_tensors(self.block, changed):
            return self._run(self.hidden if hidden is None else hidden)


class Probes:
    """The layers of a source, one after another; use it as a context manager."""

    def __init__(self, source: Source) -> None:
        self.source = source
        self.sequence = LayerSequence(source.model)
        vocabulary, self.channels = source.model.get_input_embeddings().weight.shape
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(0, vocabulary, (1, _TOKENS), generator=generator)
        tokens = tokens.to(source.placement.device)
        self.inputs = {"input_ids": tokens}
        self.batch = Batch(self.inputs)

    def __enter__(self) -> Probes:
        self.sequence.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self.sequence.__exit__(*exc)

    def layers(self) -> Iterator[tuple[int, str, Any]]:
        """Yield index, name and kind of each layer; equal kinds have equal modules."""
        for index, layer in enumerate(self.sequence.layers):
            yield index, layer.name, _kind(layer.module)

    @contextlib.contextmanager
    def layer(self, index: int) -> Iterator[LayerProbe | None]:
        """Load a layer; None if no text token reaches it. Its output is the next one's input."""
        sequence, batch = self.sequence, self.batch
        name, module = sequence.layers[index].name, sequence.modules[index]
        if batch.due(index):
            with self._outside():
                sequence.advance(batch, index)
        if index not in batch.calls:
            yield None
            return
        within = {f"{name}.{path}".rstrip("."): m for path, m in module.named_modules()}
        hidden = sequence.input(index, batch)
        last: list[Any] = []

        def run(given: torch.Tensor) -> torch.Tensor:
            with _given_instead(module, hidden, given):
                last[:] = [sequence.run(index, batch)]
            made: torch.Tensor = first_tensor(last[0])
            return made

        with self.source.loaded(module, name), computing_in(module, torch.float32):
            block = Block(name, module, within, forwards=[lambda: run(hidden)])
            probe = LayerProbe(block, hidden, run)
            first = last[0]
            yield probe
        sequence.put(index, batch, first)

    def skip(self, index: int) -> None:
        """Pass by a layer whose kind is known: its input takes the place of its output."""
        sequence, batch = self.sequence, self.batch
        if batch.due(index):
            with self._outside():
                sequence.advance(batch, index)
        if index in batch.calls:
            hidden = sequence.input(index, batch)
            output = filled(sequence.guess(index), lambda place, kind: hidden)
            sequence.put(index, batch, output)

    @contextlib.contextmanager
    def outside(self) -> Iterator[tuple[LayerProbe, LayerProbe]]:
        """Load the modules outside of layers: those before the first, and those after the last.

        The output of the first probe is the input of the first layer, that of the second are the
        logits.
        """
        sequence, model, batch = self.sequence, self.source.model, self.batch
        inside = set(sequence.modules.modules())
        within = {path: m for path, m in model.named_modules() if m not in inside}
        last = len(sequence) - 1
        given = batch.outputs[last]

        def begin(_: torch.Tensor) -> torch.Tensor:
            fresh = Batch(self.inputs)
            sequence.advance(fresh, 0)
            return sequence.input(0, fresh)

        def end(hidden: torch.Tensor) -> torch.Tensor:
            old = first_tensor(given)
            batch.outputs[last] = replaced(given, lambda each: hidden if each is old else each)
            made: torch.Tensor = first_tensor(sequence.finish(batch))
            return made

        with self._outside():
            block = Block("", model, within, forwards=[lambda: end(first_tensor(given))])
            yield (
                LayerProbe(block, self.inputs["input_ids"], begin),
                LayerProbe(block, first_tensor(given), end),
            )

    @contextlib.contextmanager
    def _outside(self) -> Iterator[None]:
        model, inside = self.source.model, self.sequence.modules
        with (
            self.source.loaded(model, "", inside),
            computing_in(model, torch.float32, without=inside),
        ):
            yield


def _kind(module: Module) -> tuple[Any, ...]:
    parameters = ((name, tuple(p.shape)) for name, p in module.named_parameters())
    return (type(module), *parameters)


@contextlib.contextmanager
def _given_instead(module: Module, hidden: torch.Tensor, given: torch.Tensor) -> Iterator[None]:
    """Call a module with another tensor wherever it would get `hidden`."""

    def swapped(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def swap(value: Any) -> Any:
            return given if value is hidden else value

        return replaced(args, swap), replaced(kwargs, swap)

    handle = module.register_forward_pre_hook(swapped, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
