"""The ways through a model: weights alone, layer by layer, or the model as a whole.

Each comes down to the same step for a part of the model: hold its weights, put observers on it, let
data pass, compute the parameters, and hand the tensors to the output.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.algorithms.module_result import ModuleResult
from steelyard.checkpoint.journal import file_record
from steelyard.checkpoint.weight_errors import weight_error
from steelyard.data.samples import Samples
from steelyard.distributed import Ranks, ThreadPool, share
from steelyard.engine.assignment import owners_of
from steelyard.engine.decisions import Decisions
from steelyard.engine.mark import Mark
from steelyard.engine.output import Output
from steelyard.engine.passes import Onward, Passes
from steelyard.engine.progress import progress
from steelyard.engine.result import Result
from steelyard.engine.statistics import RunStatistics
from steelyard.engine.stream import Stream
from steelyard.errors import PipelineError
from steelyard.kernels.partial_sums import lane_of
from steelyard.model.blocks import (
    Batch,
    LayerSequence,
    decoder_layers,
    load_hidden,
    save_hidden,
)
from steelyard.model.forward_errors import WITHOUT_DATA, forward_errors
from steelyard.model.source import Source, computing_in, fast_dtype
from steelyard.observers.lifecycle import with_schemes
from steelyard.words import count

__all__ = ["Run", "model_device"]


class Run:
    """The state of one run: what is left to do is in the calls, what was found is here."""

    def __init__(
        self,
        source: Source,
        result: Result,
        uncalibrated: str,
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
        self.device = model_device(source.model)
        self.dtype = fast_dtype(source.dtype, self.device)
        self.ranks = ranks
        self.pool = ThreadPool.on(self.device)
        continues = source.shards is not None
        self.decisions = Decisions(
            result, statistics, uncalibrated, continues, self.device, ranks, self.pool
        )
        self.passes = Passes(self.decisions, self.pool, propagate, self.dtype)
        self.done = 0  # layers
        self.streamed: dict[int, int] = {}  # shard -> its jobs that are done
        self.calibrated = False  # all modules are, and their tensors written
        self._mark_cost = 0.0  # seconds, of the last one

    # -- the ways through a model -------------------------------------------------------------

    def stream(self) -> None:
        """From file to file."""
        view, writer, plan = self.source.shards, self.output.writer, self.result.plan
        assert view is not None and writer is not None
        if not self.calibrated:
            stream = Stream(
                view,
                plan,
                writer,
                self.result.modules,
                self.state,
                self.decisions.importance.loaded,
                self.show,
            )
            stream.run(self.streamed)
            for modules in self.ranks.gather(self.result.modules):
                self.result.modules.update(modules)
        weighed = (p.name for p in plan.quantized if p.scheme.weights is not None)
        self.output.done.update(f"{name}.weight" for name in weighed)

    def weights_only(self) -> None:
        """Observe weights, module by module where the model has no layers."""
        if self.calibrated:
            return
        try:
            name, layers = decoder_layers(self.source.model)
        except PipelineError:
            self._module(self.source.model, "", None, lambda: None)
            return
        with progress("quantizing", len(layers) + 1, self.show) as advance:
            for index, layer in enumerate(layers):
                if index >= self.done:
                    self._module(layer, f"{name}.{index}", None, lambda: None)
                    self._layer_done(index)
                advance()
            self._rest(name, layers, lambda: None)
            advance()

    def layer_by_layer(self, samples: Samples) -> None:
        if self.calibrated:
            return
        sequence = LayerSequence(self.source.model)
        source, model, layers = self.source, self.source.model, sequence.layers
        mine = self._share(samples)
        total = len(mine) * (len(layers) + 1)
        with self.pool, progress("calibrating", total, self.show) as advance:
            first = f"{sequence.name}.0"
            with (
                source.loaded(layers[0], first),
                self._outside(sequence),
                computing_in(model, self.dtype),
            ):
                batches = sequence.start([tokens for _, tokens in mine], advance)
            numbered = {i: batch for (i, _), batch in zip(mine, batches, strict=True)}
            if self.done:
                assert self.output.writer is not None
                load_hidden(numbered, self._kept("hidden"))
                advance(self.done * len(batches))
            for index, layer in enumerate(layers):
                if index < self.done:
                    continue

                forwards = [functools.partial(sequence.run, index, batch) for batch in batches]

                def take(outputs: Iterable[torch.Tensor]) -> None:
                    for batch, output in zip(batches, outputs, strict=True):
                        batch.hidden = output
                        self.ranks.look()
                        advance()

                def run(forwards: Sequence[Callable[[], torch.Tensor]] = forwards) -> None:
                    outputs = (forward() for forward in self.passes.in_lanes(forwards))
                    if self.passes.propagate:
                        collections.deque(outputs, maxlen=0)
                    else:
                        take(outputs)

                onward = Onward(forwards, take, [batch.input_ids.numel() for batch in batches])
                name = f"{sequence.name}.{index}"
                self._module(layer, name, None, run, onward)
                self._layer_done(index, numbered)

            def run_rest() -> None:
                for batch in self.passes.in_lanes(batches):
                    sequence.finish(batch)

            self._rest(sequence.name, layers, run_rest)

    def whole(self, samples: Samples) -> None:
        if self.calibrated:
            return
        mine = [tokens for _, tokens in self._share(samples)]
        with self.pool, progress("calibrating", len(mine), self.show) as advance:

            def run() -> None:
                model = self.source.model
                for input_ids in self.passes.in_lanes(mine):
                    with forward_errors(model, "a run as a whole", WITHOUT_DATA):
                        model(input_ids=input_ids, use_cache=False)
                    advance()

            self._module(self.source.model, "", None, run)

    def _rest(self, name: str, layers: Module, run: Callable[[], None]) -> None:
        """Deal with what is not in a layer, such as the output projection."""
        inside = f"{name}."
        outside = [p for p in self.result.plan.quantized if not p.name.startswith(inside)]
        if outside:
            self._module(self.source.model, "", layers, run)
        elif self.source.shards is None:  # nothing to compute, but the tensors are to be written
            self.output.add(self.source.model, "", layers)

    def _outside(self, sequence: LayerSequence) -> Any:
        return self.source.loaded(self.source.model, "", sequence.layers, ("lm_head",))

    def _share(self, samples: Samples) -> list[tuple[int, torch.Tensor]]:
        """Return this rank's batches, each with its place among all; know their lanes from now."""
        batches, ranks = samples.batches, self.ranks
        mine = share(len(batches), ranks.rank, ranks.count)
        self.passes.lanes = [lane_of(i, len(batches)) for i in mine]
        return [(i, batches[i].to(self.device)) for i in mine]

    # -- stopping and going on ----------------------------------------------------------------

    def take_up(self) -> None:
        """Start where an earlier run came to, if there is one."""
        if not self.output.progress:
            return
        weights_only = self.decisions.weights_only_schemes
        for mark in map(Mark.of, self.output.progress):  # one of each rank that wrote
            for name, (error, tokens, details) in mark.modules.items():
                self.result.modules[name] = ModuleResult(error, tokens, details)
                if error is not None:
                    self.output.done.add(self.source.key(f"{name}.weight"))
            for name, scheme in mark.weights_only.items():
                weights_only[name] = QuantizationScheme.model_validate(scheme)
            self.decisions.unseen = mark.unseen
            self.result.notes += [n for n in mark.notes if n not in self.result.notes]
            self.done, self.calibrated = mark.done, mark.calibrated
            for shard, jobs in mark.streamed.items():
                self.streamed[shard] = max(jobs, self.streamed.get(shard, 0))
        writer = self.output.writer
        assert writer is not None
        if writer.finished:
            self.result.notes.append(
                f"{writer.output_dir} is complete: an earlier run wrote it, and was killed before "
                "it could say so"
            )
            return
        for path in self._kept("importance"):
            self.decisions.importance.resume(path)
        for path in self._kept("statistics"):
            self.statistics.resume(path)
        if self.ranks.is_first:
            self._forget_others()
        self.result.notes.append(
            f"continued after {count(len(self.result.modules), 'module')}, which an earlier run "
            "had done"
        )

    def state(self) -> dict[str, Any]:
        """Return, in JSON's types, what `take_up` needs."""
        modules = self.result.modules.items()
        schemes = self.decisions.weights_only_schemes.items()
        return Mark(
            done=self.done,
            streamed=self.streamed,
            calibrated=self.calibrated,
            modules={name: (m.error, m.tokens, m.details) for name, m in modules},
            weights_only={name: scheme.model_dump(mode="json") for name, scheme in schemes},
            unseen=self.decisions.unseen,
            notes=self.result.notes,
        ).model_dump(mode="json")

    def _kept(self, kind: str) -> list[Path]:
        """Return the files of one kind that the journal names."""
        writer = self.output.writer
        assert writer is not None
        return [writer.work.path / n for n in sorted(writer.files) if n.startswith(f"{kind}-")]

    def _keep(self, work: Path, when: str) -> dict[str, dict[str, int]]:
        """Write what was gathered for files that the run saves; return the journal's records."""
        kept = {}
        for kind, part in (
            ("importance", self.decisions.importance),
            ("statistics", self.statistics),
        ):
            path = work / f"{kind}-{when}"
            if part.keep(path):
                kept[path.name] = file_record(path)
        return kept

    def _forget_others(self) -> None:
        """Remove what the journal does not name: of earlier marks, or of ranks that made none."""
        writer = self.output.writer
        assert writer is not None
        for kind in ("hidden", "importance", "statistics"):
            for old in writer.work.path.glob(f"{kind}-*"):
                if old.name not in writer.files:
                    old.unlink()

    def _layer_done(self, index: int, batches: dict[int, Batch] | None = None) -> None:
        """Record, when it is time, that a layer is done, and what flows into the next."""
        self.done = index + 1
        writer = self.output.writer
        if writer is None or not self.ranks.broadcast(writer.due(self._mark_cost)):
            return
        started = time.monotonic()
        path = writer.work.path / f"hidden-{self.ranks.rank}-{self.done}.safetensors"
        files: dict[str, dict[str, int]] = {}
        if batches is not None:
            save_hidden(batches, path)
            files[path.name] = file_record(path)
        for others in self.ranks.gather(files):
            files |= others
        if not self.ranks.is_first:
            return
        files |= self._keep(writer.work.path, str(self.done))
        writer.mark(self.state(), files)
        self._forget_others()
        self._mark_cost = time.monotonic() - started

    # -- one module -------------------------------------------------------------------------

    @torch.no_grad()
    def _module(
        self,
        module: Module,
        name: str,
        without: Module | None,
        run: Callable[[], None],
        onward: Onward | None = None,
    ) -> None:
        """Calibrate `module` while data passes through it; hand its tensors to the output.

        run:    passes all data through the module, as it is before
        onward: the batches, where the module is a layer
        """
        self.ranks.at(name or "the model as a whole")
        with self.source.loaded(module, name, without):
            found = self.passes.through(module, name, without, run, onward)
            if self.statistics.only:
                self.result.modules.update(found)
                return
            if self.decisions.hopeless():  # the run goes on only to name all that saw nothing
                return
            schemes = with_schemes(module, name, without)
            self.output.add(module, name, without, owners_of(schemes, self.ranks.count))
            for each, quantized in schemes.items():
                result = found[each]
                if result.error is None:  # against the weight as it is now, which is as it was
                    error = self.output.errors.get(each)
                    error = weight_error(quantized) if error is None else error
                    result = replace(result, error=error)
                self.result.modules[each] = result

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> None:
        """All modules are dealt with; raise if some of them saw nothing."""
        self.calibrated = True
        writer = self.output.writer
        if writer is not None and writer.identity is not None and self.ranks.is_first:
            writer.files = self._keep(writer.work.path, "end")  # the next mark names them
        kept = bool(self.decisions.left) and not self.decisions.hopeless() and writer is not None
        if kept and writer is not None and self.ranks.is_first:
            writer.mark(self.state())
        self.decisions.require_all(kept)


def model_device(model: Module) -> torch.device:
    """Return where the weights are that are in memory; the CPU if none is."""
    devices: Iterator[torch.device] = (p.device for p in model.parameters())
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))
