"""Calibrates a model layer by layer: all batches run through one layer at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from steelyard.data.samples import Samples
from steelyard.engine.parts import Flow, Part
from steelyard.engine.progress import progress
from steelyard.fusion import expert_groups
from steelyard.model.activations import HiddenStates
from steelyard.model.batch_forward import BatchForward, BatchLimit, run_in_parts
from steelyard.model.blocks import Batch, LayerSequence
from steelyard.model.hidden_states import load_hidden, save_hidden
from steelyard.model.inputs import output_head, padding_of
from steelyard.model.placeholders import first_tensor
from steelyard.model.precision import computing_in
from steelyard.observers.lifecycle import with_schemes

if TYPE_CHECKING:
    from steelyard.engine.run import Run

__all__ = ["LayerRun"]

_TUNING = 19  # times as long as the rest of a layer, about; for the progress bar


class LayerRun:
    """Runs this rank's batches through the layers of a model.

    batches:   by number in the run, each with its partial sum
    originals: the same batches in the unquantized model, if an algorithm needs them
    paired:    whether each layer runs both side by side
    tuning:    steps of the progress bar for the tuning of a layer
    """

    def __init__(self, run: Run, samples: Samples) -> None:
        self.run = run
        self.held = HiddenStates(run.result.plan.room)
        self.sequence = LayerSequence(run.source.model, self.held)
        self.sequence.weighs_tokens = run.solver.needs("token_weights")
        run.source.loader.in_order(self.sequence.layers)
        mine = run.share(samples)
        self.places = [place for place, _ in mine]
        self.batches = {place[0]: Batch(inputs) for place, inputs in mine}
        experts = expert_groups(planned.name for planned in run.result.plan.quantized)
        self.paired = run.solver.needs("original_inputs") and not experts
        kept = self.paired or run.solver.needs("originals")
        self.originals = {i: Batch(b.inputs) for i, b in self.batches.items()} if kept else {}
        self.tuning = _TUNING * len(self.batches) if run.solver.tunes else 0
        self.limit = BatchLimit()

    @torch.no_grad()
    def go(self) -> None:
        """Calibrate all layers, then the modules outside of them."""
        run, sequence = self.run, self.sequence
        each = len(self.batches) + self.tuning
        total = each * len(sequence) + len(self.batches)
        unit = "work" if self.tuning else "steps"
        with (
            run.pool,
            self.held,
            sequence,
            progress("calibrating", total, run.show, unit) as advance,
        ):
            if run.done:
                load_hidden(sequence, self._named(), run.marks.kept("hidden"))
                advance(run.done * each)
            for index in range(run.done, len(sequence)):
                self._record(index)
                self._layer(index, advance)
                if not any(run.ranks.gather(sequence.is_stateful)):
                    run.marks.layer_done(index, self._save)
            self._record(len(sequence))
            ends = [functools.partial(sequence.finish, b) for b in self.batches.values()]
            run.rest(sequence.layers, Flow(ends, places=self.places))
            for rank, notes in enumerate(run.ranks.gather(self.limit.notes)):
                who = f"rank {rank}, " if run.ranks.count > 1 else ""
                run.result.notes += [f"{who}{note}" for note in notes]

    def _record(self, index: int) -> None:
        """Record the calls of the next layers."""
        run, model = self.run, self.run.source.model
        due = [batch for batch in self._named().values() if batch.due(index)]
        if not due or index == len(self.sequence):
            return
        inside, head = self.sequence.modules, output_head(model)
        with (
            run.source.loaded(model, "", inside, () if head is None else (head,)),
            computing_in(model, run.dtype, without=inside),
        ):
            for batch in due:
                self.sequence.advance(batch, index)
                run.ranks.look()

    def _layer(self, index: int, advance: Callable[..., None]) -> None:
        run, sequence = self.run, self.sequence
        name, module = sequence.layers[index].name, sequence.modules[index]
        called = [p for p in self.places if index in self.batches[p[0]].calls]
        batches = [self.batches[number] for number, _ in called]
        forwards = [self._forward(index, batch) for batch in batches]

        def collect(outputs: Iterable[Any]) -> None:
            for batch, output in zip(batches, outputs, strict=True):
                sequence.put(index, batch, output)
                run.ranks.look()
                advance()

        advance(len(self.batches) - len(batches))
        quantized = with_schemes(module, name) or run.solver.transforms
        if not (quantized or batches or run.source.in_memory):
            return  # a tower that no batch runs through
        originals = [self.originals[number] for number, _ in called] if self.paired else []
        flow = Flow(
            forwards,
            collect,
            [self._tokens(index, b) for b in batches],
            called,
            [self._forward(index, batch) for batch in originals],
            lambda i, output: sequence.put(index, originals[i], output),
            [padding_of(b.inputs, sequence.stored_input(index, b)) for b in batches],
            lambda share, where: advance(share * self.tuning, where),
        )
        part = Part(name, module)
        run.calibrate(part, flow, functools.partial(self._originals, index))

    def _originals(self, index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Run the unquantized layer; return the hidden states in and out of it, by batch.

        They are stored as `held` stores them.
        """
        found, sequence = [], self.sequence
        for batch in self.originals.values():
            if index in batch.calls:
                hidden = sequence.stored_input(index, batch)
                kept = output = sequence.stored(run_in_parts(self._forward(index, batch)))
                if not self.paired:
                    sequence.put(index, batch, output)
                found.append((hidden, first_tensor(kept)))
        return found

    def _forward(self, index: int, batch: Batch) -> BatchForward:
        return BatchForward(self.sequence, index, batch, self.limit)

    def _tokens(self, index: int, batch: Batch) -> int:
        hidden = self.sequence.stored_input(index, batch)
        return hidden.numel() // hidden.shape[-1]

    def _named(self) -> Mapping[str, Batch]:
        return {
            **{str(i): batch for i, batch in self.batches.items()},
            **{f"{i}.original": batch for i, batch in self.originals.items()},
        }

    def _save(self, path: Path) -> None:
        save_hidden(self.sequence, self._named(), path)
