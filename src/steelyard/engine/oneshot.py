"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

A recipe is planned first, and nothing heavy starts unless the plan holds. Then each block is
loaded, transformed, observed, solved and written; a recipe that needs no data goes file by file.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import disable_quantization
from torch.nn import Module

from steelyard.algorithms import Algorithm
from steelyard.data.samples import Inputs, Samples
from steelyard.data.tokenizer import checked_tokenizer
from steelyard.distributed import Ranks, together
from steelyard.engine.announce import announce
from steelyard.engine.calibration_samples import samples_for
from steelyard.engine.final_config import final_config
from steelyard.engine.identity import digest_of, identity_of
from steelyard.engine.output import Output
from steelyard.engine.planning import plan_run, streams
from steelyard.engine.result import Result
from steelyard.engine.run import Run
from steelyard.engine.run_options import Options
from steelyard.engine.save_pretrained import save_as_quantized
from steelyard.engine.saved_files import check_saved_files
from steelyard.engine.statistics import RunStatistics
from steelyard.errors import DataError, PlanError
from steelyard.model.applied_schemes import apply_schemes
from steelyard.model.experts import Experts
from steelyard.model.source import Source
from steelyard.observers.calibration import Calibration
from steelyard.plan.plan import Plan
from steelyard.recipes import load_recipe

__all__ = ["quantize"]

Leave = Callable[[Result, Path], None]


@together
def quantize(options: Options, leave: Leave | None = None) -> Result:
    """Quantize a model.

    leave: called with the result and the folder that will be put in place, before it is
    """
    with contextlib.ExitStack() as given:
        return _quantize(options, leave, given)


def _quantize(options: Options, leave: Leave | None, given: contextlib.ExitStack) -> Result:
    """Quantize a model.

    given: undoes changes of a loaded module after an error
    """
    started = time.perf_counter()
    options.check()
    recipe = load_recipe(options.recipe)
    algorithms = recipe.algorithms()
    propagate = options.propagate_error
    if propagate is None:
        propagate = any(algorithm.needs.propagate for algorithm in algorithms)
    statistics = RunStatistics(algorithms, propagate, options.save_statistics, options.statistics)
    check_saved_files(algorithms, options.save_statistics, options.output_dir)
    options.refuse_two_sources()
    streamed = streams(options, recipe, algorithms)
    source = _open(options, streamed)
    given.enter_context(source.unstacked())
    tokenizer = checked_tokenizer(
        options.tokenizer or options.processor, source, options.trust_remote_code_model
    )
    statistics.only = _observes_only(options, source)
    ranks = Ranks.current()
    plan = plan_run(options, recipe, algorithms, source, propagate)
    result = Result(
        plan, recipe, model=options.model if isinstance(options.model, Module) else None
    )
    result.source = _name_of(options.model)
    result.notes += plan.warnings
    result.warnings += plan.warnings
    shown = ranks.is_first and _shown(options)
    if shown and (options.dry_run or not plan.errors):  # which are raised below
        announce(str(plan))
    if options.dry_run:
        source.restack([])
        return result
    plan.require()
    run = Run(
        source,
        algorithms,
        result,
        options.uncalibrated,
        propagate,
        options.show_progress if ranks.is_first else False,
        ranks,
        statistics,
    )
    for algorithm in algorithms:
        algorithm.prepare(source, plan, result.notes)
    samples = samples_for(options, algorithms, source, tokenizer, statistics, result, shown)
    identity = _identity(options, algorithms, source, statistics, recipe.text, propagate, samples)
    _check_alike(options, ranks, recipe.text, propagate, statistics, samples)

    def leave_in(folder: Path) -> None:
        result.seconds = result.seconds or time.perf_counter() - started
        if leave is not None:
            leave(result, folder)

    output = Output.open(
        source,
        options.output_dir,
        options.overwrite,
        tokenizer,
        identity,
        options.resume,
        ranks,
    )
    with output as run.output:
        run.marks.resume()
        if streamed:
            run.stream()
        else:
            _prepare_model(source.model, plan, options.moe_calibrate_all_experts)
            statistics.check(source.model, _beginning(run), result.notes)
            if samples is None:
                run.weights_only()
            elif plan.whole:
                run.whole(samples)
            else:
                run.layer_by_layer(samples)
        run.end()
        result.changed = sorted(run.changed)
        if ranks.is_first and not run.output.was_complete:  # else they are in place already
            statistics.save(result.notes)
            for algorithm in algorithms:
                algorithm.save()
        final = final_config(
            plan.config,
            run.solver.claims,
            run.solver.weights_only_schemes,
            source.module_key,
            source.class_name,
            result.notes,
        )
        folder = None
        if ranks.is_first:
            folder = run.output.finish(
                final, recipe.text, result.modules, plan, run.marks.state(), leave_in
            )
        result.output_dir = ranks.broadcast(folder)
    if result.model is not None:
        save_as_quantized(
            source,
            final,
            recipe.text,
            result.modules,
            plan,
            tokenizer,
            leave_in,
            first=ranks.is_first,
        )
    result.seconds = time.perf_counter() - started
    return result


def _open(options: Options, streamed: bool) -> Source:
    if streamed:
        return Source.from_files(options.model, options.model_revision)
    return Source.open(options.model, options.model_revision, options.trust_remote_code_model)


def _observes_only(options: Options, source: Source) -> bool:
    """Whether the run ends with statistics; refuse a folder without a place for the checkpoint."""
    if source.shards is None or options.output_dir is not None:
        return False
    if options.save_statistics is None and not options.dry_run:
        raise PlanError("output_dir is missing: where should the checkpoint go?")
    return options.save_statistics is not None


def _shown(options: Options) -> bool:
    if options.show_progress is None:
        return sys.stderr.isatty()
    return options.show_progress


def _identity(
    options: Options,
    algorithms: Sequence[Algorithm],
    source: Source,
    statistics: RunStatistics,
    recipe: str,
    propagate: bool,
    samples: Samples | None,
) -> dict[str, Any] | None:
    """Return what a run must have in common with an unfinished one to resume it."""
    if source.shards is None or options.output_dir is None:
        return None
    given: dict[str, Any] = {
        "pipeline": options.pipeline,
        "propagate_error": propagate,
        "moe_calibrate_all_experts": options.moe_calibrate_all_experts,
    }
    for algorithm in algorithms:
        given |= algorithm.digests()
    given |= statistics.digests()
    return identity_of(source.shards, recipe, given, _batches(samples))


def _check_alike(
    options: Options,
    ranks: Ranks,
    recipe: str,
    propagate: bool,
    statistics: RunStatistics,
    samples: Samples | None,
) -> None:
    """Refuse ranks that were started with different things."""
    same = (
        *(options.pipeline, propagate, options.uncalibrated, options.resume, options.overwrite),
        options.moe_calibrate_all_experts,
    )
    mine = {
        "recipe": recipe,
        "calibration data": digest_of(_batches(samples)),
        "pipeline": same,
        "output_dir": options.output_dir is not None,
        **statistics.digests(),
    }
    for rank, other in enumerate(ranks.gather(mine)):
        for name in {**mine, **other}:
            if other.get(name) != mine.get(name):
                raise DataError(
                    f"ranks {rank} and {ranks.rank} have different {name}; all ranks must be "
                    "started with the same"
                )


def _batches(samples: Samples | None) -> Sequence[Inputs]:
    return () if samples is None else samples.batches


def _prepare_model(model: Module, plan: Plan, all_tokens: bool) -> None:
    """Put schemes on the modules; until it is calibrated, a module runs unquantized.

    all_tokens: whether ranges of the inputs of experts cover all tokens
    """
    model.eval()
    for module in model.modules():
        if isinstance(module, Experts):
            module.all_tokens = all_tokens
    left = [*plan.config.ignore, *(item.name for item in plan.left)]
    apply_schemes(model, plan.config.model_copy(update={"ignore": left}))
    model.apply(disable_quantization)


def _beginning(run: Run) -> Callable[[Calibration], object]:
    """Return what starts the algorithms of a run on the model as a whole."""
    model = run.source.model
    return lambda calibration: run.solver.begin(run.solver.block("", model, None, calibration))


def _name_of(model: Any) -> str:
    """Return what to call a model: its name on the hub, or that of its folder or class."""
    given = getattr(model, "name_or_path", "") if isinstance(model, Module) else str(model)
    if not given:
        return type(model).__name__
    return Path(given).resolve().name if Path(given).is_dir() else str(given)
