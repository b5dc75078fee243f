"""The ways through a model: weights alone, layer by layer, or the model as a whole.

Each comes down to the same step for a part of the model: hold its weights, put observers on it, let
data pass, compute the parameters, and hand the tensors to the output.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from torch.nn import Module, Parameter

from steelyard.calibration import Calibration
from steelyard.calibration.lifecycle import observed_tokens, with_schemes
from steelyard.distributed import Crew, Ranks, share
from steelyard.errors import CalibrationError, PipelineError
from steelyard.kernels.lane_sum import lane_of
from steelyard.modifiers import GPTQModifier
from steelyard.observers.fusion import fused_groups
from steelyard.pipelines.data import Samples
from steelyard.pipelines.dealt_weights import of_weight, owners_of
from steelyard.pipelines.figures import module_figures, with_figures
from steelyard.pipelines.gptq import GPTQ, Gathering
from steelyard.pipelines.importance import RunImportance
from steelyard.pipelines.progress import progress
from steelyard.pipelines.result import ModuleResult, Result
from steelyard.pipelines.saving import Output
from steelyard.pipelines.sequential import (
    Batch,
    LayerSequence,
    Until,
    decoder_layers,
    load_hidden,
    save_hidden,
)
from steelyard.pipelines.source import Source, computing_in, fast_dtype, rounded_once
from steelyard.pipelines.staged import BESIDE, Staged, find_stages, holding_budget
from steelyard.pipelines.statistics import RunStatistics
from steelyard.pipelines.streaming import Stream
from steelyard.pipelines.weight_errors import weight_error

__all__ = ["Run", "model_device"]

T = TypeVar("T")


@dataclass(frozen=True)
class Onward:
    """How the batches come from one quantized layer to the next.

    forwards: what each batch makes of the layer
    take:     takes what came out, batch after batch
    tokens:   of the first batch
    """

    forwards: Sequence[Callable[[], torch.Tensor]]
    take: Callable[[Iterable[torch.Tensor]], None]
    tokens: int


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
        self.uncalibrated = uncalibrated
        self.propagate = propagate
        self.show = show
        self.output: Output
        self.importance = RunImportance(result.recipe)
        self.statistics = statistics
        self.unseen: list[str] = []
        self.weights_only_schemes: dict[str, QuantizationScheme] = {}
        self.device = model_device(source.model)
        self.dtype = fast_dtype(source.dtype, self.device)
        modifiers = [m for m in result.recipe.modifiers if isinstance(m, GPTQModifier)]
        self.gptq = GPTQ(modifiers[0], result.notes) if modifiers else None
        self.ranks = ranks
        self.crew = Crew.on(self.device)
        self.done = 0  # layers
        self.streamed: dict[int, int] = {}  # shard -> its jobs that are done
        self._lanes: list[int] = []  # of this rank's batches; see `kernels.lane_sum`
        self._lane = 0  # of the batch that flows
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
                self.importance.loaded,
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
        with self.crew, progress("calibrating", total, self.show) as advance:
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
                work = self.output.writer.work.path
                load_hidden(numbered, work.glob(f"hidden-*-{self.done}.safetensors"))
                advance(self.done * len(batches))
            for index, layer in enumerate(layers):
                if index < self.done:
                    continue

                forwards = [functools.partial(sequence.run, index, batch) for batch in batches]

                def take(outputs: Iterable[torch.Tensor]) -> None:
                    for batch, output in zip(batches, outputs, strict=True):
                        batch.hidden = output
                        advance()

                def run(forwards: Sequence[Callable[[], torch.Tensor]] = forwards) -> None:
                    outputs = (forward() for forward in self._in_lanes(forwards))
                    if self.propagate:
                        collections.deque(outputs, maxlen=0)
                    else:
                        take(outputs)

                tokens = batches[0].input_ids.numel() if batches else 0
                onward = Onward(forwards, take, tokens)
                name = f"{sequence.name}.{index}"
                self._module(layer, name, None, run, onward)
                self._layer_done(index, numbered)

            def run_rest() -> None:
                for batch in self._in_lanes(batches):
                    sequence.finish(batch)

            self._rest(sequence.name, layers, run_rest)

    def whole(self, samples: Samples) -> None:
        if self.calibrated:
            return
        mine = [tokens for _, tokens in self._share(samples)]
        with self.crew, progress("calibrating", len(mine), self.show) as advance:

            def run() -> None:
                for input_ids in self._in_lanes(mine):
                    self.source.model(input_ids=input_ids, use_cache=False)
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
        self._lanes = [lane_of(i, len(batches)) for i in mine]
        return [(i, batches[i].to(self.device)) for i in mine]

    def _in_lanes(self, values: Sequence[T]) -> Iterator[T]:
        """Yield what there is of each of this rank's batches, and note the lane that it is in."""
        for lane, value in zip(self._lanes, values, strict=True):
            self._lane = lane
            yield value

    # -- stopping and going on ----------------------------------------------------------------

    def take_up(self) -> None:
        """Start where an earlier run came to, if there is one."""
        if not self.output.progress:
            return
        for mark in self.output.progress:  # one of each rank that wrote
            for name, (error, tokens, details) in mark["modules"].items():
                self.result.modules[name] = ModuleResult(error, tokens, details)
                if error is not None:
                    self.output.done.add(self.source.key(f"{name}.weight"))
            for name, scheme in mark["weights_only"].items():
                self.weights_only_schemes[name] = QuantizationScheme.model_validate(scheme)
            self.unseen = mark["unseen"]
            self.result.notes += [n for n in mark["notes"] if n not in self.result.notes]
            self.done, self.calibrated = mark["done"], mark["calibrated"]
            for shard, jobs in mark["streamed"].items():
                self.streamed[int(shard)] = max(jobs, self.streamed.get(int(shard), 0))
        assert self.output.writer is not None
        work = self.output.writer.work.path
        self.importance.take_up(work, self.done)
        self.statistics.take_up(work, self.done)
        if self.ranks.is_first:
            self._forget_others(work)
        count = len(self.result.modules)
        self.result.notes.append(f"continued after {count} modules, which an earlier run had done")

    def state(self) -> dict[str, Any]:
        """Return, in JSON's types, what `take_up` needs."""
        schemes = self.weights_only_schemes.items()
        return {
            "done": self.done,
            "streamed": self.streamed,
            "calibrated": self.calibrated,
            "modules": {
                name: [m.error, m.tokens, m.details] for name, m in self.result.modules.items()
            },
            "weights_only": {name: scheme.model_dump(mode="json") for name, scheme in schemes},
            "unseen": self.unseen,
            "notes": self.result.notes,
        }

    def _forget_others(self, work: Path) -> None:
        """Remove what was kept for other marks than this, or by ranks that did not come to one."""
        for kind in ("hidden", "importance", "statistics"):
            for old in work.glob(f"{kind}-*"):
                if not old.stem.endswith(f"-{self.done}"):
                    old.unlink()

    def _layer_done(self, index: int, batches: dict[int, Batch] | None = None) -> None:
        """Record, when it is time, that a layer is done, and what flows into the next."""
        self.done = index + 1
        writer = self.output.writer
        if writer is None or not self.ranks.broadcast(writer.due(self._mark_cost)):
            return
        started = time.monotonic()
        path = writer.work.path / f"hidden-{self.ranks.rank}-{self.done}.safetensors"
        if batches is not None:
            save_hidden(batches, path)
        self.ranks.wait()
        if not self.ranks.is_first:
            return
        self.importance.keep(writer.work.path, self.done)
        self.statistics.keep(writer.work.path, self.done)
        writer.mark(self.state())
        self._forget_others(writer.work.path)
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
            stages = self._stages(module, name, onward) if onward is not None else None
            if onward is None or stages is None or self.gptq is None:
                found = self._in_passes(module, name, without, run, onward, stages)
            else:
                found = self._in_stages(module, name, stages, onward)
            if self.statistics.only:
                self.result.modules.update(found)
                return
            if self._hopeless():  # the run goes on only to name all that saw nothing
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

    def _in_passes(
        self,
        module: Module,
        name: str,
        without: Module | None,
        run: Callable[[], None],
        onward: Onward | None,
        stages: list[list[str]] | None,
    ) -> dict[str, ModuleResult]:
        """Decide on all modules after one pass; another shows the next layer what comes of it."""
        again = onward if self.propagate else None
        every = [each for stage in stages for each in stage] if stages else None
        with Calibration(module, name, without, every) as calibration:
            gptq = self._begin(calibration)
            with (
                computing_in(module, self.dtype),
                gptq or contextlib.nullcontext(),
                self._until_seen(module, calibration) if again else contextlib.nullcontext(),
            ):
                if stages is None or onward is None:
                    run()
                else:
                    self._beside(calibration, stages, onward)
            found = self._decide(calibration, gptq)
        if again is not None:
            crew = self.crew if stages is not None else Crew()  # of one
            rounded = rounded_once(calibration.modules.values())
            with computing_in(module, self.dtype, scales=True), rounded:
                again.take(crew.do(enumerate(again.forwards)))
        return found

    def _beside(self, calibration: Calibration, stages: list[list[str]], onward: Onward) -> None:
        """Show the modules of a layer what flows into them, with several batches on their way."""
        parts = [[calibration.modules[each] for each in stage] for stage in stages]
        calibration.take_over()

        def outputs() -> Iterator[torch.Tensor]:
            left, count = onward.forwards, self.crew.count
            while left:
                some, left = left[:count], left[count:]
                with Staged(parts, some, sys.maxsize, self.crew) as staged:
                    for index, stage in enumerate(stages):
                        staged.run_to(index, functools.partial(calibration.show, stage))
                    if not self.propagate:
                        yield from staged.finish()
                count = max(BESIDE // staged.largest, self.crew.count)

        if self.propagate:
            collections.deque(outputs(), maxlen=0)
        else:
            onward.take(outputs())

    def _in_stages(
        self, layer: Module, name: str, stages: list[list[str]], onward: Onward
    ) -> dict[str, ModuleResult]:
        """Decide on the modules of a layer in the order of their calls, in a single pass."""
        modules = with_schemes(layer, name)
        parts = [[modules[each] for each in stage] for stage in stages]
        found: dict[str, ModuleResult] = {}
        with (
            computing_in(layer, self.dtype, without=modules.values()),
            contextlib.ExitStack() as decided,
            Staged(parts, onward.forwards, holding_budget(self.device), self.crew) as staged,
        ):
            for index, stage in enumerate(stages):
                with Calibration(layer, name, shown=stage) as calibration:
                    gptq = self._begin(calibration)
                    assert gptq is not None
                    shown = self._in_lanes([gptq.show] * len(onward.forwards))
                    show = functools.partial(_to_next, shown)
                    staged.run_to(
                        index, functools.partial(calibration.show, stage), show, settle=gptq.settle
                    )
                    found |= self._decide(calibration, gptq)
                for module in parts[index]:
                    decided.enter_context(computing_in(module, self.dtype, scales=True))
                decided.enter_context(rounded_once(parts[index]))
            onward.take(staged.finish())
        return found

    def _stages(self, layer: Module, name: str, onward: Onward) -> list[list[str]] | None:
        """Return the modules of a layer in the order of their calls; None where hooks must tell.

        That is where outputs or the states of attention are observed, where the data may say which
        modules are called, where the server fuses modules of different inputs, with GPTQ on what
        was there before, and where nothing is to be gained.
        """
        modules = with_schemes(layer, name)
        outputs = any(_scheme(m).output_activations is not None for m in modules.values())
        if outputs or not modules or (self.gptq is not None and not self.propagate):
            return None
        stages = None
        gains = self.gptq is not None or self.crew.count > 1
        if self.ranks.is_first and gains:  # who always has a batch
            with computing_in(layer, self.dtype, without=modules.values()):
                stages = find_stages(modules, onward.forwards[0], onward.tokens)
        stages = self.ranks.broadcast(stages)
        stage_of = {each: i for i, stage in enumerate(stages or ()) for each in stage}
        fused = fused_groups(stage_of)
        return stages if all(len({stage_of[n] for n in g}) == 1 for g in fused) else None

    def _begin(self, calibration: Calibration) -> Gathering | None:
        """Before any data: settle who gathers what."""
        self.importance.only_where_asked(calibration)
        if self.gptq is None:
            return None
        return self.gptq.begin(calibration.modules, lambda: self._lane, self.ranks, self.crew)

    def _decide(self, calibration: Calibration, gptq: Gathering | None) -> dict[str, ModuleResult]:
        """After all data: find the parameters of the modules, and round their weights."""
        ranks, modules = self.ranks, calibration.modules
        owners = owners_of(modules, ranks.count)
        mine = [name for name in modules if owners[name] == ranks.rank]
        calibration.sync(ranks)
        self.statistics.exchange(calibration, self.device)
        if gptq is not None:
            gptq.meet(owners)
            gptq.weigh(mine)
        self.importance.exchange(calibration)
        if self.statistics.only:
            return {name: ModuleResult(None, observed_tokens(m)) for name, m in modules.items()}
        self._note_unseen(calibration)
        known = len(self.result.notes)
        if gptq is not None:
            gptq.regroup(mine)
        calibration.finish(mine)
        nearest = [n for n in mine if gptq is None or n not in gptq.modules]
        figures = {name: with_figures({}, module_figures(modules[name])) for name in nearest}
        found = {
            n: ModuleResult(None, observed_tokens(m), figures.get(n, {}))
            for n, m in modules.items()
        }
        if gptq is not None:
            found.update(gptq.finish(mine))
        self._note_unweighed(calibration)
        if ranks.count > 1:
            found.update(self._tell(modules, mine, found, known, gptq is not None))
        return found

    def _tell(
        self,
        modules: Mapping[str, Module],
        mine: list[str],
        found: Mapping[str, ModuleResult],
        known: int,
        solved: bool,
    ) -> dict[str, ModuleResult]:
        """Give the other ranks what was found for the weights dealt to this one, and take theirs.

        known:  how many notes there were before
        solved: the weights themselves have changed
        """
        notes, gathered = self.result.notes, self.importance.gathered
        own = {n: (of_weight(modules[n], solved), found[n], gathered.get(n)) for n in mine}
        results: dict[str, ModuleResult] = {}
        for rank, (news, told) in enumerate(self.ranks.gather((own, notes[known:]))):
            if rank == self.ranks.rank:
                continue
            notes += told
            for name, (tensors, result, importance) in news.items():
                for leaf, value in tensors.items():
                    tensor = value.to(self.device)
                    modules[name].register_parameter(leaf, Parameter(tensor, requires_grad=False))
                results[name] = result
                if importance is not None:
                    gathered[name] = importance
        return results

    def _until_seen(self, layer: Module, calibration: Calibration) -> Any:
        """End the first of two passes where nothing is left to be seen, such as before `down_proj`.

        Outputs, and the states of attention, are seen only when a module has run.
        """
        inputs = all(base in ("weight", "input") for _, base, _ in calibration.observers())
        if not inputs or not calibration.modules:
            return contextlib.nullcontext()
        return Until(layer, calibration.modules.values())

    def _hopeless(self) -> list[str]:
        """Return the modules that saw nothing and have no weights to fall back to."""
        if self.uncalibrated == "error" and self.source.shards is None:
            return self.unseen
        return [name for name in self.unseen if name not in self.weights_only_schemes]

    def _note_unseen(self, calibration: Calibration) -> None:
        for name in calibration.unseen():
            self.unseen.append(name)
            module: Any = calibration.modules[name]
            scheme = module.quantization_scheme.model_copy(
                update={"input_activations": None, "output_activations": None}
            )
            # those of a file go on, so that a run which ends in an error can be continued
            goes_on = self.uncalibrated == "weights-only" or self.source.shards is not None
            if goes_on and scheme.weights is not None:
                module.quantization_scheme = scheme
                self.weights_only_schemes[name] = scheme
                for parameter in [p for p in module._parameters if _of_activations(p)]:
                    del module._parameters[parameter]

    def _note_unweighed(self, calibration: Calibration) -> None:
        if not self.result.recipe.needs_data:
            return
        for name, _, observer in calibration.observers():
            reason = getattr(observer, "fallback_reason", None)
            if reason is not None:
                self.result.notes.append(f"{name}: its columns weigh alike, since {reason}")

    # -- the end ----------------------------------------------------------------------------

    def end(self) -> None:
        """All modules are dealt with; raise if some of them saw nothing."""
        self.calibrated = True
        writer = self.output.writer
        if writer is not None and writer.identity is not None and self.ranks.is_first:
            self.importance.keep(writer.work.path, self.done)
            self.statistics.keep(writer.work.path, self.done)
        allowed = self.weights_only_schemes if self.uncalibrated == "weights-only" else ()
        left = [name for name in self.unseen if name not in allowed]
        if not left:
            return
        kept = ""
        if writer is not None and not self._hopeless():
            if self.ranks.is_first:
                writer.mark(self.state())
            kept = " What was calibrated is kept, and need not be again if you choose the second."
        shown = "\n".join(f"  - {name}" for name in left)
        raise CalibrationError(
            f"{len(left)} modules saw no token of the calibration data, so they have no scale:\n"
            f'{shown}\nUse more samples, or uncalibrated="weights-only" to quantize only their '
            f"weights, or add them to ignore.{kept}"
        )

    def final_config(self, config: QuantizationConfig) -> QuantizationConfig:
        """Return the config that the checkpoint gets; modules of a scheme of their own by name."""
        groups = dict(config.config_groups)
        by_scheme: dict[str, list[str]] = {}
        for name, scheme in self.weights_only_schemes.items():
            by_scheme.setdefault(scheme.model_dump_json(exclude={"targets"}), []).append(name)
        extra = {}
        for i, names in enumerate(by_scheme.values()):
            scheme = self.weights_only_schemes[names[0]]
            extra[f"weights_only_{i}"] = scheme.model_copy(update={"targets": names})
            self.result.notes.append(
                f"{len(names)} modules saw no token; only their weights are quantized: "
                + ", ".join(names)
            )
        return config.model_copy(update={"config_groups": {**extra, **groups}})


def _scheme(module: Any) -> Any:
    return module.quantization_scheme


def _to_next(calls: Iterator[Callable[[torch.Tensor], None]], x: torch.Tensor) -> None:
    next(calls)(x)


def _of_activations(parameter: str) -> bool:
    return parameter.startswith(("input_", "output_"))


def model_device(model: Module) -> torch.device:
    """Return where the weights are that are in memory; the CPU if none is."""
    devices: Iterator[torch.device] = (p.device for p in model.parameters())
    return next((d for d in devices if d.type != "meta"), torch.device("cpu"))
