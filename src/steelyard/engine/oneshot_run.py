"""The steps of `oneshot`, in the order in which `quantize` calls them."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig
from torch.nn import Module

from steelyard.checkpoint.provenance import RunRecord
from steelyard.data.samples import Inputs, Samples
from steelyard.data.tokenizer import checked_tokenizer
from steelyard.distributed import Ranks
from steelyard.engine.announce import announce
from steelyard.engine.calibration_samples import CalibrationLoader, samples_for
from steelyard.engine.final_config import final_config
from steelyard.engine.finishing import finish_checkpoint, share_results
from steelyard.engine.identity import digest_of, identity_of
from steelyard.engine.idle_options import idle_notes
from steelyard.engine.output import Output
from steelyard.engine.planning import plan_run, streams
from steelyard.engine.prepared_model import prepare_model
from steelyard.engine.prepared_options import open_source, prepared
from steelyard.engine.rank_agreement import check_alike
from steelyard.engine.record import effective_options, input_digests, record_of
from steelyard.engine.result import Result
from steelyard.engine.rewriting import add_matrices, claim_rewritten, rewrite
from steelyard.engine.run import Run
from steelyard.engine.run_options import Options
from steelyard.engine.save_pretrained import save_as_quantized
from steelyard.engine.saved_files import check_saved_files
from steelyard.engine.scheme_choice import with_chosen_schemes
from steelyard.engine.statistics import RunStatistics
from steelyard.engine.step_choice import with_chosen_steps
from steelyard.engine.uncalibratable import leave_unquantized
from steelyard.errors import PlanError
from steelyard.formats import DENSE
from steelyard.model.model_folder import model_name
from steelyard.model.placement import placement_of
from steelyard.model.source import Source
from steelyard.observers.calibration import Calibration
from steelyard.plan.tied_weights import untying_notes
from steelyard.recipes import load_recipe

__all__ = ["AddReport", "OneshotRun"]

AddReport = Callable[[Result, Path], None]


class OneshotRun:
    """One run of `oneshot`.

    undo: restores a loaded module after an error
    """

    result: Result
    run: Run
    samples: Samples | None
    config: QuantizationConfig  # the one that is written

    def __init__(self, options: Options, undo: contextlib.ExitStack) -> None:
        """Load the recipe and open the model."""
        self.started = time.perf_counter()
        self.options = options = prepared(options)
        self.ranks = Ranks.current()
        self.load = CalibrationLoader(options, self.ranks)
        recipe = load_recipe(options.recipe, options.stage)
        recipe = with_chosen_schemes(recipe, options, self.load)
        self.recipe = with_chosen_steps(recipe, options, self.load)
        self.algorithms = self.recipe.algorithms()
        asked = options.propagate_error
        needed = any(algorithm.needs.propagate for algorithm in self.algorithms)
        self.propagate = needed if asked is None else asked
        self.statistics = RunStatistics(
            self.algorithms, self.propagate, options.save_statistics, options.statistics
        )
        check_saved_files(self.algorithms, options.save_statistics, options.output_dir)
        options.refuse_two_sources()
        self.streamed = streams(options, self.recipe, self.algorithms)
        self.placement = placement_of(options.device, options.model)
        self.source = open_source(options, self.streamed, self.placement)
        undo.enter_context(self.source.unstacked())
        self.tokenizer = checked_tokenizer(
            options.tokenizer or options.processor, self.source, options.trust_remote_code_model
        )
        self.statistics.only = _observes_only(options, self.source)

    def make_plan(self) -> None:
        """Plan the run; raise the plan's errors, unless it is a dry run."""
        options = self.options
        plan = plan_run(options, self.recipe, self.algorithms, self.source, self.propagate)
        given = options.model if isinstance(options.model, Module) else None
        self.result = Result(plan, self.recipe, model=given, source=model_name(options.model))
        self.result.notes += [*idle_notes(options), *untying_notes(plan), *plan.chosen]
        self.result.notes += plan.warnings
        self.result.notes += [] if plan.through is None else filter(None, [plan.through.reason])
        self.result.warnings += plan.warnings
        if self._shown and (options.dry_run or not plan.errors):  # raised below
            announce(str(plan))
        if options.dry_run:
            self.source.restack([])
            self.source.tie()
        else:
            plan.require()

    def load_data(self) -> None:
        """Load calibration samples and the algorithms' files; all ranks must load the same."""
        options, result = self.options, self.result
        self.run = Run(
            self.source,
            self.algorithms,
            result,
            (options.uncalibrated, options.uncalibratable),
            self.propagate,
            options.show_progress if self.ranks.is_first else False,
            self.ranks,
            self.statistics,
        )
        rewrite(self.run)
        for algorithm in self.algorithms:
            algorithm.prepare(self.source, result.plan, result.notes)
        self.samples = samples_for(
            options,
            self.algorithms,
            self.source,
            self.tokenizer,
            self.statistics,
            result,
            self._shown,
            self.load,
        )
        if self.samples is not None:
            result.notes += filter(None, [self.run.forward.reason])
        self._check_alike()

    @contextlib.contextmanager
    def open_output(self) -> Iterator[None]:
        """Open a work folder for the checkpoint, or that of an unfinished run."""
        output = Output.open(
            self.source,
            self.options.output_dir,
            self.options.overwrite,
            self.tokenizer,
            self._identity(),
            self.options.resume,
            self.ranks,
            format=None if self.options.save_compressed and self.algorithms else DENSE,
        )
        with output as self.run.output:
            claim_rewritten(self.run)
            yield

    def resume(self) -> None:
        self.run.marks.resume()

    def solve_blocks(self) -> None:
        """Quantize and write block by block, or file by file."""
        run, plan, source = self.run, self.result.plan, self.source
        if self.streamed:
            run.stream()
        else:
            prepare_model(source.model, plan, self.options.moe_calibrate_all_experts)
            self.statistics.check(source.model, _beginning(run), self.result.notes)
            if self.samples is None:
                run.weights_only()
            elif plan.whole:
                run.whole(self.samples)
            else:
                run.layer_by_layer(self.samples)
        run.end()
        self.result.changed = sorted(run.changed)

    def save_files(self) -> None:
        """Save statistics and the algorithms' files, before the checkpoint is moved into place."""
        if self.ranks.is_first and not self.run.output.was_complete:  # else they exist already
            self.statistics.save(self.result.notes)
            for algorithm in self.algorithms:
                algorithm.save()

    def finish(self, add_report: AddReport | None) -> None:
        """Validate the checkpoint, add the report, and move the folder into place."""
        run, result = self.run, self.result
        leave_unquantized(result.plan, run.solver.own_schemes)
        self.config = final_config(
            result.plan.config,
            run.solver.claims,
            run.solver.own_schemes,
            self.source.module_key,
            self.source.class_name,
            result.notes,
        )
        folder, trusted = None, self.options.trust_remote_code_model
        if self.ranks.is_first:
            add_matrices(run.output, result.plan)
            folder = run.output.finish(
                self.config,
                self.recipe.text,
                result.modules,
                result.plan,
                run.marks.state(),
                self._reporter(add_report),
                partial(finish_checkpoint, run, self.samples, trusted),
                self._record,
            )
        result.output_dir = self.ranks.broadcast(folder)
        share_results(run)

    def save_module(self, add_report: AddReport | None) -> None:
        """Make `save_pretrained` of a loaded module write the quantized checkpoint."""
        result = self.result
        if result.model is not None and self.algorithms:
            save_as_quantized(
                self.source,
                self.config,
                self.recipe.text,
                result.modules,
                result.plan,
                self.tokenizer,
                self._reporter(add_report),
                first=self.ranks.is_first,
            )
        result.seconds = time.perf_counter() - self.started

    # -- details ------------------------------------------------------------------------------

    @property
    def _shown(self) -> bool:
        """Whether this process shows the plan."""
        asked = self.options.show_progress
        return self.ranks.is_first and (sys.stderr.isatty() if asked is None else asked)

    def _reporter(self, add_report: AddReport | None) -> Callable[[Path], None]:
        """Return a function that adds the report to a folder."""

        def add(folder: Path) -> None:
            self.result.seconds = self.result.seconds or time.perf_counter() - self.started
            if add_report is not None:
                add_report(self.result, folder)

        return add

    def _identity(self) -> dict[str, Any] | None:
        """Return the digests that must match those of an unfinished run to resume it."""
        if self.source.shards is None or self.options.output_dir is None:
            return None
        given = effective_options(self.options, self.propagate) | input_digests(self.algorithms)
        through = self.result.plan.through
        if not self.source.placement.is_host and (through is None or through.used):
            given["device"] = self.source.placement.device.type
        if self.samples is not None:
            computed = self.run.forward.products or self.run.dtype or self.source.dtype
            given["batches are computed in"] = str(computed)
        given |= self.statistics.digests()
        return identity_of(self.source.shards, self.recipe.text, given, _batches(self.samples))

    def _record(self) -> RunRecord:
        """Return what provenance.json states about the run."""
        data, statistics = _batches(self.samples), self.statistics.digests()
        inputs = (self.recipe.text, data, self.algorithms, statistics)
        return record_of(*inputs, self.options, self.propagate, self.result.modules)

    def _check_alike(self) -> None:
        """Raise if ranks were started with different options, recipes or data."""
        options = self.options
        effective = effective_options(options, self.propagate).values()
        same = (*effective, options.uncalibrated, options.resume, options.overwrite)
        mine = {
            "recipe": self.recipe.text,
            "calibration data": digest_of(_batches(self.samples)),
            "pipeline": same,
            "output_dir": options.output_dir is not None,
            **self.statistics.digests(),
        }
        check_alike(self.ranks, mine)


def _observes_only(options: Options, source: Source) -> bool:
    """Whether the run only saves statistics; raise if a checkpoint has no `output_dir`."""
    if source.shards is None or options.output_dir is not None:
        return False
    if options.save_statistics is None and not options.dry_run:
        raise PlanError("output_dir is missing: where should the checkpoint go?")
    return options.save_statistics is not None


def _batches(samples: Samples | None) -> Sequence[Inputs]:
    return () if samples is None else samples.batches


def _beginning(run: Run) -> Callable[[Calibration], object]:
    """Return a function that starts the algorithms of a run on the whole model."""
    model = run.source.model
    return lambda calibration: run.solver.begin(run.solver.block("", model, None, calibration))
