"""Runs a model over all samples in fp32, with one decoder layer in memory at a time.

The hidden states of all samples take tokens x hidden size x 4 bytes. They are held in memory or,
beyond a limit, in memory-mapped files. A narrower type than fp32 would add rounding errors of its
own to those of the quantization.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import NonFiniteError, PipelineError
from steelyard.evaluate.cost import Costs
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.precision import computing_in
from steelyard.model.source import Source

__all__ = ["DTYPE", "HiddenStates", "LayerwiseModel", "default_memory"]

DTYPE = torch.float32


def default_memory() -> int:
    """Return a quarter of the machine's memory, in bytes."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4


class HiddenStates:
    """Storage for hidden states: memory, or temporary files that are removed on exit.

    nbytes: total size of all hidden states
    memory: limit in bytes; beyond it, all go to files in TMPDIR
    """

    def __init__(self, nbytes: int, memory: int) -> None:
        self.spilled = nbytes > memory
        self._stack = contextlib.ExitStack()
        self._files = 0

    def __enter__(self) -> HiddenStates:
        if self.spilled:
            self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, *exc: object) -> None:
        self._stack.close()

    def first(self, hidden: torch.Tensor) -> torch.Tensor:
        """Store the first hidden states of a batch, and return the stored tensor."""
        if not self.spilled:
            return hidden
        path = self._folder / str(self._files)
        self._files += 1
        mapped = torch.from_file(str(path), shared=True, size=hidden.numel(), dtype=hidden.dtype)
        return mapped.view(hidden.shape).copy_(hidden)

    def next(self, place: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Replace the stored hidden states of a batch, and return the stored tensor."""
        return place.copy_(hidden) if self.spilled else hidden


class LayerwiseModel:
    """Runs one model over all samples, layer by layer.

    role: base or quantized, for messages
    """

    def __init__(self, source: Source, role: str) -> None:
        assert source.shards is not None
        self.source = source
        self.role = role
        self.label = f"the {role} model ({source.shards.folder})"
        with self._layer_errors():
            self.sequence = LayerSequence(source.model)

    @property
    def vocab_size(self) -> int:
        return int(self.source.model.config.get_text_config().vocab_size)

    @property
    def hidden_size(self) -> int:
        return int(self.source.model.config.get_text_config().hidden_size)

    @torch.no_grad()
    def run(
        self,
        samples: list[torch.Tensor],
        held: HiddenStates,
        costs: Costs,
        advance: Callable[[float, str], None],
    ) -> list[Batch]:
        """Return the batches after the last layer.

        advance: called after each step, with its cost and its place
        """
        sequence, source, model = self.sequence, self.source, self.source.model
        count = len(sequence.layers)
        batches = []
        with (
            source.loaded(sequence.layers[0], f"{sequence.name}.0"),
            source.loaded(model, "", sequence.layers, ("lm_head",)),
            computing_in(model, DTYPE),
        ):
            advance(costs.outside, f"{self.role} model")
            for input_ids in samples:
                with self._layer_errors():
                    (batch,) = sequence.start([input_ids], lambda: None)
                self._check(batch.hidden, "the input of the first layer")
                batch.hidden = held.first(batch.hidden)
                batches.append(batch)
        for index, layer in enumerate(sequence.layers):
            name = f"{sequence.name}.{index}"
            where = f"{self.role} model, layer {index + 1} of {count}"
            with source.loaded(layer, name), computing_in(layer, DTYPE):
                advance(costs.loading(index), where)
                for batch in batches:
                    output = sequence.run(index, batch)
                    self._check(output, f"the output of {name}")
                    batch.hidden = held.next(batch.hidden, output)
                    advance(costs.layer(index, batch.input_ids.numel()), where)
        return [Batch(batch.input_ids, batch.hidden) for batch in batches]

    @contextlib.contextmanager
    def head(self) -> Iterator[None]:
        """Hold the modules after the layers in memory, without the often large embedding."""
        model = self.source.model
        embedding = model.get_input_embeddings()
        name = next(n for n, m in model.named_modules() if m is embedding)
        width = embedding.weight.shape[-1]

        def zeros(input_ids: torch.Tensor) -> torch.Tensor:
            return torch.zeros(*input_ids.shape, width, dtype=DTYPE)

        before = embedding.__dict__.get("forward")
        with self.source.loaded(model, "", self.sequence.layers, (name,)):
            try:
                embedding.__dict__["forward"] = zeros
                with computing_in(model, DTYPE):
                    yield
            finally:
                del embedding.__dict__["forward"]
                if before is not None:
                    embedding.__dict__["forward"] = before

    def logits(self, batch: Batch, positions: slice) -> torch.Tensor:
        """Return (batch, positions, vocabulary), within `head`.

        After the layers, positions are independent of each other.
        """
        part = Batch(batch.input_ids[:, positions], batch.hidden[:, positions])
        output: Any = self.sequence.finish(part)
        logits: torch.Tensor = output.logits
        self._check(logits, "its logits", "are")
        return logits

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
