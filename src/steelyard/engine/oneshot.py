"""From a model and a recipe to a checkpoint, in one call.

    oneshot("path/to/model", recipe, dataset="calibration.jsonl", output_dir="quantized")

A recipe is planned first, and nothing heavy starts unless the plan holds. A recipe that needs no
data goes from file to file, tensor by tensor. One that does runs the decoder's layers one after
another; a layer is calibrated in the pass that computes the input of the next.
"""

from __future__ import annotations

import contextlib
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from compressed_tensors.quantization import QuantizationConfig, disable_quantization
from torch.nn import Module

from steelyard.algorithms.gptq import moment_bytes, waiting_bytes
from steelyard.data.limits import check_numbers, learned_positions
from steelyard.data.samples import HARDLY_ANY_TOKENS, load_samples
from steelyard.data.tokenizer import checked_tokenizer, tokenizer_of
from steelyard.distributed import Ranks, ThreadPool, together
from steelyard.engine.announce import announce
from steelyard.engine.identity import digest_of, identity_of
from steelyard.engine.output import Output
from steelyard.engine.result import Result
from steelyard.engine.run import Run, model_device
from steelyard.engine.save_pretrained import save_as_quantized
from steelyard.engine.saved_files import check_saved_files
from steelyard.engine.stages import BESIDE, holding_budget
from steelyard.engine.statistics import RunStatistics
from steelyard.engine.stream import budget_of, jobs_of, restack
from steelyard.errors import CalibrationWarning, DataError, PlanError, nearest
from steelyard.model.applied_schemes import apply_schemes
from steelyard.model.class_loading import ONLY_TRANSFORMERS
from steelyard.model.completeness import missing_parts, random_parameters
from steelyard.model.restoring import restored_on_error
from steelyard.model.source import Source
from steelyard.modifiers import GPTQModifier
from steelyard.plan.plan import Left, Plan, make_plan
from steelyard.plan.planned_files import planned_loading
from steelyard.plan.runnable import unrunnable
from steelyard.recipes import Recipe, load_recipe

__all__ = ["oneshot"]

PIPELINES = ("auto", "sequential", "basic", "datafree")
UNCALIBRATED = ("error", "weights-only")


@together
def oneshot(
    model: Any,
    recipe: Any = None,
    dataset: Any = None,
    output_dir: str | Path | None = None,
    *,
    tokenizer: Any = None,
    processor: Any = None,
    num_calibration_samples: int = 512,
    max_seq_length: int | None = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    splits: str | None = None,
    shuffle_calibration_samples: bool = True,
    seed: int = 0,
    pipeline: str = "auto",
    propagate_error: bool | None = None,
    uncalibrated: str = "error",
    save_statistics: str | Path | None = None,
    statistics: str | Path | None = None,
    overwrite: bool = False,
    resume: bool = True,
    dry_run: bool = False,
    model_revision: str | None = None,
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
    leave: Callable[[Result, Path], None] | None = None,
) -> Result:
    """Quantize a model.

    model:        a folder, a name on the hub, or a loaded module (which is changed in place)
    recipe:       see `steelyard.recipes.load_recipe`
    dataset:      see `steelyard.data.samples.load_samples`; only where the recipe needs data
    output_dir:   where the checkpoint goes; may be left out for a loaded module, or to save only
                  statistics
    pipeline:     sequential (layer by layer) | basic (the whole model at once) | datafree (from
                  file to file); auto takes the last where no data is needed, else the first
    propagate_error: show each layer what the quantized layers before it give, at the cost of a
                  second pass where the recipe has no GPTQModifier; None does so where a modifier
                  asks for it
    uncalibrated: what a module that no token reached gets: an error, or weights-only
    save_statistics: a file for what the observers see; see `steelyard.engine.statistics`
    statistics:   such a file, instead of a dataset
    resume:       resume an unfinished run for the same output; False starts anew
    dry_run:      stop after the plan
    leave:        called with the result and the folder that will be put in place, before it is
    """
    started = time.perf_counter()
    _one_of("pipeline", pipeline, PIPELINES)
    _one_of("uncalibrated", uncalibrated, UNCALIBRATED)
    max_seq_length = 2048 if max_seq_length is None else max_seq_length
    check_numbers(
        num_calibration_samples=num_calibration_samples,
        max_seq_length=max_seq_length,
        batch_size=batch_size,
        seed=seed,
    )
    ranks = Ranks.current()
    show_progress = show_progress if ranks.is_first else False
    loaded = load_recipe(recipe)
    config = _config_of(loaded)
    if propagate_error is None:
        propagate_error = any(m.propagates_error for m in loaded.modifiers)
    kept = RunStatistics(loaded, propagate_error, save_statistics, statistics)
    check_saved_files(loaded, save_statistics, output_dir)
    if statistics is not None and dataset is not None:
        raise DataError("statistics= is taken instead of data: leave dataset out")
    streams = _streams(model, loaded, config, pipeline)
    source = (
        Source.from_files(model, model_revision)
        if streams
        else Source.open(model, model_revision, trust_remote_code_model)
    )
    tokenizer = checked_tokenizer(tokenizer or processor, source, trust_remote_code_model)
    observe_only = source.shards is not None and output_dir is None and save_statistics is not None
    if source.shards is not None and output_dir is None and not (dry_run or observe_only):
        raise PlanError("output_dir is missing: where should the checkpoint go?")
    plan = make_plan(source.model, config, modifiers=loaded.modifiers)
    if streams and source.shards is not None:
        restack(source.shards, plan)
        plan.budget = budget_of(source.shards, jobs_of(source.shards, plan))
    plan.errors += _taken_names(plan, source)
    if loaded.needs_data and statistics is None:
        plan.errors += unrunnable(source, pipeline)
    plan.errors += missing_parts(source)
    if not plan.errors:
        plan.warnings += random_parameters(source)
        alone = source.config().get("model_type") in ONLY_TRANSFORMERS
        (plan.errors if alone else plan.warnings).extend(planned_loading(source, config, plan))
    _note_unknown(plan, source)
    text_config = source.model.config.get_text_config()
    plan.layers = getattr(text_config, "num_hidden_layers", 1)
    plan.hidden = getattr(text_config, "hidden_size", 0)
    device = model_device(source.model)
    at_once = ThreadPool.on(device).count * batch_size * max_seq_length  # tokens
    if loaded.needs_data and statistics is None:
        plan.tokens = num_calibration_samples * max_seq_length  # at most
        plan.passes = 2 if propagate_error else 1
        plan.waiting = waiting_bytes(plan, BESIDE, at_once)
    if any(isinstance(m, GPTQModifier) for m in loaded.modifiers):
        plan.moments = moment_bytes(plan)
        if propagate_error:
            plan.passes = 1.5
            plan.waiting = waiting_bytes(plan, holding_budget(device), at_once)
    shown = show_progress or (show_progress is None and sys.stderr.isatty())
    if shown and (dry_run or not plan.errors):  # which are raised below
        announce(str(plan))
    result = Result(plan, loaded, model=model if isinstance(model, Module) else None)
    result.source = _name_of(model)
    result.notes += plan.warnings
    result.warnings += plan.warnings
    if dry_run:
        return result
    plan.require()
    kept.only = observe_only
    run = Run(source, result, uncalibrated, propagate_error, show_progress, ranks, kept)
    run.decisions.importance.load(source, plan, result.notes)
    needs_data = loaded.needs_data
    if pipeline == "datafree" and needs_data and statistics is None:
        raise DataError('the recipe needs calibration data, so pipeline="datafree" cannot run it')
    if needs_data and dataset is None and statistics is None:
        raise DataError(
            "the recipe needs calibration data (static activations, a KV cache or importance): "
            "pass dataset=, or the statistics= of an earlier run"
        )
    if dataset is not None and not needs_data:
        note = "the recipe needs no calibration data; the dataset is not read"
        result.notes.append(note)
        warnings.warn(note, stacklevel=2)
    samples = None
    if statistics is not None:
        result.notes.append(kept.describe(source))
    elif needs_data:
        samples = load_samples(
            dataset,
            tokenizer=lambda: tokenizer_of(tokenizer, source, trust_remote_code_model),
            num_calibration_samples=num_calibration_samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            split=splits,
            shuffle=shuffle_calibration_samples,
            seed=seed,
            vocab_size=getattr(text_config, "vocab_size", None),
            max_positions=learned_positions(source.model),
        )
        result.notes.append(samples.description)
        if few := samples.shortage():
            result.notes.append(few)
            result.warnings.append(few)
            if shown:
                announce(f"warning: {few}")
            elif samples.num_tokens < HARDLY_ANY_TOKENS:  # surely a mistake
                warnings.warn(few, CalibrationWarning, stacklevel=4)
        kept.begin(source, result.source, loaded.text, samples)
    tokens = samples.batches if samples is not None else ()
    alike = {
        "recipe": loaded.text,
        "calibration data": digest_of(tokens),
        "pipeline": (pipeline, propagate_error, uncalibrated, resume, overwrite),
        "output_dir": output_dir is not None,
    }
    _check_alike(ranks, alike | kept.digests())
    identity = None
    if source.shards is not None and output_dir is not None:
        options = {"pipeline": pipeline, "propagate_error": propagate_error}
        options |= run.decisions.importance.digests() | kept.digests()
        identity = identity_of(source.shards, loaded.text, options, tokens)
    given = restored_on_error(model) if result.model is not None else contextlib.nullcontext()
    destination = Output.open(source, output_dir, overwrite, tokenizer, identity, resume, ranks)

    def leave_in(folder: Path) -> None:
        result.seconds = result.seconds or time.perf_counter() - started
        if leave is not None:
            leave(result, folder)

    with given, destination as run.output:
        run.take_up()
        if streams:
            run.stream()
        else:
            source.model.eval()
            left = [*config.ignore, *(item.name for item in plan.left)]
            apply_schemes(source.model, config.model_copy(update={"ignore": left}))
            # until its calibration, a module runs as it is
            source.model.apply(disable_quantization)
            kept.check(source.model, run.decisions.importance, result.notes)
            if samples is None:
                run.weights_only()
            elif pipeline == "basic":
                run.whole(samples)
            else:
                run.layer_by_layer(samples)
        run.end()
        if ranks.is_first and not run.output.was_complete:  # else they are in place already
            kept.save(result.notes)
            run.decisions.importance.save()
        final = run.decisions.final_config(config, source.module_key, source.class_name)
        folder = None
        if ranks.is_first:
            folder = run.output.finish(
                final, loaded.text, result.modules, plan, run.state(), leave_in
            )
        result.output_dir = ranks.broadcast(folder)
    if result.model is not None:
        save_as_quantized(
            source,
            final,
            loaded.text,
            result.modules,
            plan,
            tokenizer,
            leave_in,
            first=ranks.is_first,
        )
    result.seconds = time.perf_counter() - started
    return result


def _streams(model: Any, recipe: Recipe, config: QuantizationConfig, pipeline: str) -> bool:
    """Whether the files alone are enough: no data, and no class that only the model knows."""
    if isinstance(model, Module) or recipe.needs_data or pipeline not in ("auto", "datafree"):
        return False
    if config.kv_cache_scheme is not None:  # attention is a matter of classes
        return False
    named = [*config.ignore, *(t for s in config.config_groups.values() for t in s.targets)]
    classes = {name for name in named if name[:1].isupper()} - {"Linear", "Embedding"}
    return not classes


def _taken_names(plan: Plan, source: Source) -> list[str]:
    """Return what is wrong with a source that holds tensors by the names of those to be written."""
    if source.shards is None or plan.errors:
        return []
    found = []
    for planned in plan.quantized:
        key = source.module_key(planned.name)
        taken = [
            leaf
            for leaf in planned.tensors
            if leaf != "weight" and f"{key}.{leaf}" in source.shards
        ]
        if taken:
            found.append(
                f"{key}.{taken[0]} is in {source.shards.folder} already; give the checkpoint that "
                "it was made from, or ignore the module"
            )
    return found


def _note_unknown(plan: Plan, source: Source) -> None:
    """List the tensors of the files that the model class does not know: they are copied."""
    for name in source.unknown():
        assert source.shards is not None
        info = source.shards.info(name)
        plan.source_bytes += info.nbytes
        reason = f"no part of {type(source.model).__name__}, copied"
        plan.left.append(Left(name.removesuffix(".weight"), info.shape, info.nbytes, reason))


def _config_of(recipe: Recipe) -> QuantizationConfig:
    """Return the one configuration that the recipe's modifiers amount to."""
    quantizing = [m for m in recipe.modifiers if m.quantization_config() is not None]
    if len(quantizing) != 1:
        raise PlanError(
            f"the recipe has {len(quantizing)} modifiers that quantize; give one, with a "
            "config_group for each scheme"
        )
    config = quantizing[0].quantization_config()
    assert config is not None
    return config


def _check_alike(ranks: Ranks, what: dict[str, Any]) -> None:
    """Refuse ranks that were started with different things."""
    for rank, other in enumerate(ranks.gather(what)):
        for name in {**what, **other}:
            if other.get(name) != what.get(name):
                raise DataError(
                    f"ranks {rank} and {ranks.rank} have different {name}; all ranks must be "
                    "started with the same"
                )


def _name_of(model: Any) -> str:
    """Return what to call a model: its name on the hub, or that of its folder or class."""
    given = getattr(model, "name_or_path", "") if isinstance(model, Module) else str(model)
    if not given:
        return type(model).__name__
    return Path(given).resolve().name if Path(given).is_dir() else str(given)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ValueError(f"{name}={value!r} is not known: {nearest(str(value), allowed)}")
