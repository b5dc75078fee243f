"""Runs a model over all samples in fp32, with one decoder layer in memory at a time.

A narrower type than fp32 would add rounding errors of its own to those of the quantization.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any

import torch

from steelyard.errors import NonFiniteError, PipelineError
from steelyard.model.activations import HiddenStates, fetched
from steelyard.model.batch_forward import BatchForward, BatchLimit, run_in_parts
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.cost import Costs
from steelyard.model.inputs import output_head
from steelyard.model.placeholders import first_tensor, replaced
from steelyard.model.precision import computing_in
from steelyard.model.source import Source
from steelyard.model.stand_ins import standing_in

__all__ = ["DTYPE", "LayerwiseModel", "default_memory"]

DTYPE = torch.float32


def default_memory() -> int:
    """Return a quarter of the machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


class LayerwiseModel:
    """Runs one model over all samples, layer by layer.

    role:  base or quantized, for messages
    limit: samples to run at a time
    """

    def __init__(self, source: Source, role: str, limit: BatchLimit | None = None) -> None:
        self.source = source
        self.role = role
        self.limit = limit or BatchLimit()
        name = source.origin or type(source.model).__name__
        self.label = f"the {role} model ({name})"
        with self._layer_errors():
            self.sequence = LayerSequence(source.model)
        source.loader.in_order(self.sequence.layers)

    @property
    def vocab_size(self) -> int:
        return int(self.source.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.source.model.config.get_text_config().hidden_size)

    def run(
        self,
        samples: Sequence[Mapping[str, torch.Tensor]],
        held: HiddenStates,
        costs: Costs,
        advance: Callable[[float, str], None],
    ) -> list[Batch]:
        """Return the batches after the last layer; see `walk`."""
        batches = [Batch(inputs) for inputs in samples]
        for _ in self.walk(batches, held, costs, advance):
            pass
        return batches

    def walk(
        self,
        batches: Sequence[Batch],
        held: HiddenStates,
        costs: Costs,
        advance: Callable[[float, str], None],
    ) -> Generator[int, None, None]:
        """Run batches through the layers; yield the index of each while its weights are in memory.

        advance: called after each step, with its cost and its place
        """
        sequence, source = self.sequence, self.source
        sequence.held = held
        for index, layer in enumerate(sequence.layers):
            where = f"{self.role} model, layer {index + 1} of {len(sequence)}"
            with sequence, self._layer_errors():
                self.record(batches, index)
            if index == 0:
                advance(costs.outside, f"{self.role} model")
            with (
                sequence,
                source.loaded(layer.module, layer.name),
                computing_in(layer.module, DTYPE),
            ):
                advance(costs.loading(index), where)
                for batch in batches:
                    if index in batch.calls:
                        with torch.no_grad():
                            forward = BatchForward(sequence, index, batch, self.limit)
                            output = run_in_parts(forward)
                        self._check(first_tensor(output), f"the output of {layer.name}")
                        sequence.put(index, batch, output)
                    advance(costs.layer(index, batch.inputs["input_ids"].numel()), where)
                yield index

    def record(self, batches: Sequence[Batch], index: int) -> None:
        """Record the calls of the next layers that are not known yet; enter the sequence first."""
        due = [batch for batch in batches if batch.due(index)]
        if not due:
            return
        model, inside = self.source.model, self.sequence.modules
        head = output_head(model)
        with (
            self.source.loaded(model, "", inside, () if head is None else (head,)),
            computing_in(model, DTYPE, without=inside),
        ):
            for batch in due:
                self.sequence.advance(batch, index)
                if index == 0 and 0 in batch.calls:
                    self._check(self.sequence.input(0, batch), "the input of the first layer")

    @contextlib.contextmanager
    def head(self) -> Iterator[None]:
        """Hold the modules after the layers in memory, without the often large embedding."""
        model = self.source.model
        embedding = model.get_input_embeddings()
        name = next(n for n, m in model.named_modules() if m is embedding)
        width = embedding.weight.shape[-1]

        def zeros(input_ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*input_ids.shape, width, dtype=DTYPE, device=input_ids.device)

        inside = self.sequence.modules
        with (
            self.sequence,
            self.source.loaded(model, "", inside, (name,)),
            standing_in({embedding: zeros}),
            computing_in(model, DTYPE, without=inside),
        ):
            yield

    def logits(self, batch: Batch, positions: slice) -> torch.Tensor:
        """Return (batch, positions, vocabulary), within `head`; gradients pass if they are enabled.

        After the layers, positions are independent of each other. Pixels have none: with them, the
        forward runs on the whole batch, and only the output head on the positions.
        """
        if set(batch.inputs) != {"input_ids"}:
            with self._head_on(positions):
                return self._finished(batch.inputs, batch.outputs)
        outputs = replaced(batch.outputs, lambda value: fetched(value)[:, positions])
        inputs = {name: tensor[:, positions] for name, tensor in batch.inputs.items()}
        return self._finished(inputs, outputs)

    def _finished(
        self, inputs: Mapping[str, torch.Tensor], outputs: dict[int, Any]
    ) -> torch.Tensor:
        """Return the logits that the model makes of the outputs of its layers."""
        with self._layer_errors():
            output: Any = self.sequence.finish(Batch(inputs, outputs, needed=set(outputs)))
        logits: torch.Tensor = output.logits
        self._check(logits, "its logits", "are")
        return logits

    @contextlib.contextmanager
    def _head_on(self, positions: slice) -> Iterator[None]:
        """Give the output head some positions of its input, (batch, seq, hidden) alone."""
        model = self.source.model
        name = output_head(model)
        if name is None:
            raise PipelineError(
                f"{self.label} cannot be evaluated with images or audio: {type(model).__name__} "
                "does not name its output head (get_output_embeddings)"
            )

        def part(_head: torch.nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[Any, ...]:
            return args[0][:, positions], *args[1:]

        handle = model.get_submodule(name).register_forward_pre_hook(part)
        try:
            yield
        finally:
            handle.remove()

    @contextlib.contextmanager
    def _layer_errors(self) -> Iterator[None]:
        """Report a model that cannot run layer by layer as one that cannot be evaluated."""
        try:
            yield
        except PipelineError as error:
            reason = str(error).partition(";")[0]
            raise PipelineError(
                f"{self.label} cannot be evaluated, because it must run layer by layer: {reason}"
            ) from error

    def _check(self, values: torch.Tensor, what: str, verb: str = "is") -> None:
        # A finite sum proves finite terms and is quick; it may also overflow, so check again.
        if not bool(torch.isfinite(values.sum())) and not bool(torch.isfinite(values).all()):
            raise NonFiniteError(
                f"{self.label} computes NaN or infinity: {what} {verb} the first that "
                f"{verb} not finite. Look for a scale there that is missing, zero or NaN, and "
                "quantize the model again"
            )
