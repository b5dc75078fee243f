"""The pipelines of a run: file by file, weights alone, layer by layer, or the model as a whole.

Except for files, each does the same for a part of the model: load its weights, run the batches,
transform and solve it, write its tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn import ModuleList

from steelyard.algorithms import Algorithm
from steelyard.checkpoint.weight_errors import weight_error
from steelyard.data.samples import Inputs, Samples
from steelyard.distributed import Ranks, ThreadPool, batches_of
from steelyard.engine.assignment import owners_of
from steelyard.engine.layer_run import LayerRun
from steelyard.engine.marks import Marks
from steelyard.engine.output import Output
from steelyard.engine.parts import NO_DATA, Flow, Part
from steelyard.engine.passes import Passes
from steelyard.engine.progress import progress
from steelyard.engine.result import Result
from steelyard.engine.solving import Solver
from steelyard.engine.statistics import RunStatistics
from steelyard.engine.stream import Stream
from steelyard.errors import PipelineError
from steelyard.kernels.partial_sums import partial_sum_of
from steelyard.model.fast_attention import fast_attention
from steelyard.model.forward_errors import WITHOUT_DATA, forward_errors
from steelyard.model.inputs import call_options, forward_inputs, padding_mask, without_cache
from steelyard.model.precision import computing_in, multiplying_in
from steelyard.model.source import Source
from steelyard.model.stacks import Layer, model_layers
from steelyard.observers.lifecycle import with_schemes
from steelyard.observers.padding import without_padding
from steelyard.words import count

__all__ = ["Run"]


class Run:
    """State of one run."""

    def __init__(
        self,
        source: Source,
        algorithms: Sequence[Algorithm],
        result: Result,
        uncalibrated: tuple[str, str],
        propagate: bool,
        show: bool | None,
        ranks: Ranks,
        statistics: RunStatistics,
    ) -> None:
        self.source = source
        self.result = result
        self.show = show
        self.output: Output
        self.statistics = statistics
        self.device = source.placement.device
        self.forward = ranks.broadcast(result.plan.forward)  # the first decides: processors differ
        self.dtype = self.forward.dtype
        self.ranks = ranks
        self.pool = ThreadPool.on(self.device)
        resumable = source.shards is not None
        self.solver = Solver(
            algorithms, result, statistics, uncalibrated, resumable, self.device, ranks, self.pool
        )
        self.passes = Passes(self.solver, self.pool, propagate, self.forward)
        self.done = 0  # number of finished layers
        self.streamed: dict[int, int] = {}  # shard -> number of its finished jobs
        self.calibrated = False  # whether all modules are calibrated and written
        self.finished = 0  # number of algorithms that have finished the checkpoint
        self.changed: set[str] = set()  # tensors that transforms changed
        self.marks = Marks(self)

    # -- pipelines ----------------------------------------------------------------------------

    def stream(self) -> None:
        """Quantize file by file, without a model."""
        view, writer, plan = self.source.shards, self.output.writer, self.result.plan
        assert view is not None and writer is not None
        if not self.calibrated:
            stream = Stream(
                view,
                plan,
                writer,
                self.result.modules,
                self.marks.state,
                self._importance(),
                self.show,
                self.source.placement if plan.through.used else None,
            )
            stream.run(self.streamed)
            for modules in self.ranks.gather(dict(self.result.modules)):
                self.result.modules.update(modules)
        weighed = (p.name for p in plan.quantized if p.scheme.weights is not None)
        self.output.done.update(f"{name}.weight" for name in weighed)

    def _importance(self) -> dict[str, tuple[torch.Tensor, int]]:
        """Return the importance of modules from files; the first modifier that has it counts."""
        names = [planned.name for planned in self.result.plan.quantized]
        found = {}
        for algorithm in reversed(self.solver.algorithms):
            known = {name: algorithm.importance(name) for name in names}
            found.update({name: sums for name, sums in known.items() if sums is not None})
        return found

    def weights_only(self) -> None:
        """Quantize weights layer by layer, or all at once if the model has no layers."""
        if self.calibrated:
            return
        try:
            layers = model_layers(self.source.model)
        except PipelineError:
            self.calibrate(Part("", self.source.model))
            return
        self.source.loader.in_order(layers)
        with progress("quantizing", len(layers) + 1, self.show) as advance:
            for index, layer in enumerate(layers):
                if index >= self.done:
                    self.calibrate(Part(layer.name, layer.module))
                    self.marks.layer_done(index)
                advance()
            self.rest(layers)
            advance()

    def layer_by_layer(self, samples: Samples) -> None:
        if not self.calibrated:
            LayerRun(self, samples).go()

    def whole(self, samples: Samples) -> None:
        if self.calibrated:
            return
        model, mine = self.source.model, self.share(samples)
        options = call_options(model)
        total = len(mine) * self.solver.passes
        with self.pool, without_cache(model), progress("calibrating", total, self.show) as advance:

            def run(inputs: Inputs) -> None:
                with (
                    forward_errors(model, "a run as a whole", WITHOUT_DATA),
                    without_padding(padding_mask(inputs)),
                ):
                    model(**forward_inputs(inputs), **options)
                advance()

            forwards = [functools.partial(run, inputs) for _, inputs in mine]
            flow = Flow(forwards, places=[place for place, _ in mine])
            self.calibrate(Part("", model), flow)

    def rest(self, layers: Sequence[Layer], flow: Flow = NO_DATA) -> None:
        """Calibrate everything outside of the layers, such as the output projection."""
        inside = ModuleList([layer.module for layer in layers])
        names = {layer.name for layer in layers}
        outside = [p for p in self.result.plan.quantized if not _is_within(p.name, names)]
        if outside or self.solver.transforms:
            self.calibrate(Part("", self.source.model, inside), flow)
        elif self.source.shards is None:  # nothing to compute, but tensors to write
            self.output.add(self.source.model, "", inside)

    def share(self, samples: Samples) -> list[tuple[tuple[int, int], Inputs]]:
        """Return this rank's batches, each with its number in the run and its partial sum."""
        batches, ranks = samples.batches, self.ranks
        mine = batches_of(len(batches), ranks.rank, ranks.count)
        return [((i, partial_sum_of(i, len(batches))), self._placed(batches[i])) for i in mine]

    def _placed(self, inputs: Inputs) -> Inputs:
        """Return a batch on the model's device, floating-point tensors in the compute dtype."""
        dtype = self.dtype or self.source.dtype
        return {
            name: tensor.to(self.device, dtype if tensor.is_floating_point() else tensor.dtype)
            for name, tensor in inputs.items()
        }

    # -- one part of the model --------------------------------------------------------------

    @torch.no_grad()
    def calibrate(
        self,
        part: Part,
        flow: Flow = NO_DATA,
        originals: Callable[[], list[tuple[torch.Tensor, torch.Tensor]]] = list,
    ) -> None:
        """Load a part of the model, run its batches, solve it, and write its tensors.

        originals: returns the hidden states of the unquantized model in and out of the part
        """
        name, root, without = part.name, part.root, part.without
        self.ranks.at(name or "the model as a whole")
        with (
            self.source.loaded(root, name, without),
            multiplying_in(root, self.forward.products),
            fast_attention(),
        ):
            if self.solver.needs("originals"):
                with computing_in(root, self.dtype):
                    part.originals.extend(originals())
            found = self.passes.through(part, flow)
            if self.statistics.only:
                self.result.modules.update(found)
                return
            if self.solver.unrecoverable():  # continue only to list all such modules
                return
            schemes = with_schemes(root, name, without)
            owners = owners_of(schemes, self.ranks.count)
            self.output.add(root, name, without, owners, part.changed)
            self.changed.update(map(self.source.key, part.changed))
            for each, quantized in schemes.items():
                result = found[each]
                if result.error is None:  # measured now, before the weight is rounded
                    error = self.output.errors.get(each)
                    error = weight_error(quantized) if error is None else error
                    result = replace(result, error=error)
                self.result.modules[each] = result

    def _note_changed(self) -> None:
        changing = [a for a in self.solver.algorithms if a.transforms or a.rewrites]
        if changing and not self.calibrated:
            writer = self.output.writer
            self.changed |= set() if writer is None else writer.changed  # includes a resumed run's
            by = " and ".join(type(a.modifier).__name__ for a in changing)
            example = f", such as {min(self.changed)}" if self.changed else ""
            self.result.notes.append(f"{by} changed {count(len(self.changed), 'tensor')}{example}")

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> None:
        """Write the last mark; raise if some modules saw no token."""
        self._note_changed()
        self.calibrated = True
        writer = self.output.writer
        if writer is not None and writer.identity is not None and self.ranks.is_first:
            writer.files = self.marks.keep(writer.work.path, "end")  # the next mark names them
        kept = bool(self.solver.uncalibrated_modules) and not self.solver.unrecoverable()
        kept = kept and writer is not None
        if kept and writer is not None and self.ranks.is_first:
            writer.mark(self.marks.state())
        self.solver.require_all(kept)


def _is_within(name: str, layers: set[str]) -> bool:
    """Whether a module is within one of the layers."""
    while name and name not in layers:
        name = name.rpartition(".")[0]
    return bool(name)
