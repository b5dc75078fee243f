"""The plan of a run: that of the recipe, plus files, data and costs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationConfig
from torch.nn import Module

from steelyard.algorithms import Algorithm, needs_data
from steelyard.distributed import Ranks, ThreadPool
from steelyard.engine.held_memory import CONCURRENT_BYTES
from steelyard.engine.prepared_options import target_problems, untie_heads
from steelyard.engine.run_options import Options
from steelyard.engine.stream_device import choose_device
from steelyard.engine.stream_jobs import budget_of, jobs_of
from steelyard.errors import PipelineError
from steelyard.model.activations import room_for
from steelyard.model.class_loading import ONLY_TRANSFORMERS
from steelyard.model.completeness import missing_parts, random_parameters
from steelyard.model.placement import holding_budget
from steelyard.model.precision import forward_dtype
from steelyard.model.source import Source
from steelyard.plan.device_memory import device_bytes
from steelyard.plan.plan import Left, Plan, make_plan
from steelyard.plan.planned_files import planned_loading
from steelyard.plan.runnable import Route, route_of
from steelyard.recipes import Recipe
from steelyard.words import count, size

__all__ = ["plan_run", "rewrites_first", "streams"]


def streams(options: Options, recipe: Recipe, algorithms: Sequence[Algorithm]) -> bool:
    """Whether the run can go file by file: it needs no data, and no module classes."""
    if isinstance(options.model, Module) or options.route not in ("auto", "datafree"):
        return False
    if not options.save_compressed:
        return False
    if needs_data(algorithms) or not all(algorithm.streams for algorithm in algorithms):
        return False
    configs = [modifier.quantization_config() for modifier in recipe.modifiers]
    return not any(_names_classes(config) for config in configs if config is not None)


def _names_classes(config: QuantizationConfig) -> bool:
    if config.kv_cache_scheme is not None:  # attention modules are found by class
        return True
    named = [*config.ignore, *(t for s in config.config_groups.values() for t in s.targets)]
    return bool({name for name in named if name[:1].isupper()} - {"Linear", "Embedding"})


def plan_run(
    options: Options,
    recipe: Recipe,
    algorithms: list[Algorithm],
    source: Source,
    propagate: bool,
) -> Plan:
    """Return the plan of a run, with its errors and costs.

    algorithms: those that would change nothing are replaced by one that does nothing
    """
    plan = make_plan(source.model, modifiers=recipe.modifiers)
    _leave_idle(plan, algorithms)
    plan.chosen += recipe.chosen
    heads, tied = untie_heads(options, recipe.modifiers, source.model)
    plan.left = [_beside(left, heads, source.model) for left in plan.left]
    plan.untied = {**heads, **plan.untied}
    plan.errors += [*tied, *target_problems(options, source.model)]
    source.restack([planned.name for planned in plan.quantized])
    if not plan.errors:
        source.untie(plan.untied)
    files = source.shards
    if files is not None and streams(options, recipe, algorithms):
        plan.budget = budget_of(files, jobs_of(files, plan))
        plan.route = "file by file, without data"
        plan.through = Ranks.current().broadcast(choose_device(plan, source.placement))
        plan.placing += filter(None, [plan.through.reason])
    needs = [algorithm.needs for algorithm in algorithms]
    compares, precisely = any(n.blocks for n in needs), any(n.precisely for n in needs)
    plan.forward = forward_dtype(source.dtype, source.placement.device, compares, precisely)
    with_data = needs_data(algorithms) and options.statistics is None
    plan.errors += _taken_names(plan, source)
    plan.errors += rewrites_first(algorithms)
    if plan.served and not options.save_compressed:
        plan.errors.append(
            f"save_compressed=False cannot store rotation {plan.served[0].group}, which a server "
            "applies: remove the option or the rotation"
        )
    plan.errors += _needs_of_blocks(options, algorithms)
    plan.errors += _needs_of_finishing(options, recipe, algorithms)
    if with_data:
        try:
            route = route_of(source.model, options.route)
            plan.route, plan.whole = route.text, route.whole
            plan.device = str(source.placement.device)
            plan.errors += _finishing_layers(route, algorithms)
        except PipelineError as error:
            plan.errors.append(str(error))
    plan.errors += missing_parts(source)
    plan.errors += _without_names(plan, source)
    if not plan.errors:
        plan.warnings += random_parameters(source)
        alone = source.config().get("model_type") in ONLY_TRANSFORMERS
        loading = planned_loading(source, plan.config, plan)
        (plan.errors if alone else plan.warnings).extend(loading)
    _note_unknown(plan, source)
    text = source.model.config.get_text_config()
    plan.layers = getattr(text, "num_hidden_layers", 1)
    plan.hidden = getattr(text, "hidden_size", 0)
    if with_data:
        _add_costs(plan, options, algorithms, source.placement.device, propagate)
        _add_hidden_states(plan, options, algorithms, source)
    if not source.placement.is_host and not streams(options, recipe, algorithms):
        at_once = options.batch_size * options.sequence_length if with_data else 0
        device = source.placement.device
        ranks = Ranks.current()
        plan.device_memory = device_bytes(plan, source.model, device, at_once, ranks.count)
        plan.placing.append(f"at most about {size(plan.device_memory)} of memory on {device}")
        plan.placing += filter(None, [ranks.way])
    return plan


def _leave_idle(plan: Plan, algorithms: list[Algorithm]) -> None:
    adapted = [i for i, each in enumerate(algorithms) if not each.rounds_to_nearest]
    for index, algorithm in enumerate(algorithms):
        if (reason := algorithm.idle(plan, adapted)) is not None:
            algorithms[index] = Algorithm(algorithm.modifier)
            plan.chosen.append(f"{type(algorithm.modifier).__name__} changes nothing: {reason}")


def _add_hidden_states(
    plan: Plan, options: Options, algorithms: Sequence[Algorithm], source: Source
) -> None:
    """State where hidden states live between two layers."""
    placement, asked = source.placement, options.activations
    plan.room = room_for(asked, placement.device)
    twice = any(a.needs.originals or a.needs.original_inputs for a in algorithms)
    itemsize = (plan.forward.dtype or source.dtype).itemsize
    plan.hidden_bytes = plan.tokens * plan.hidden * itemsize * (2 if twice else 1)
    if plan.whole:
        return
    if not placement.is_host or asked != "auto" or plan.hidden_bytes > plan.room.host:
        plan.placing.append(plan.room.text(plan.hidden_bytes, placement.device))


def _add_costs(
    plan: Plan,
    options: Options,
    algorithms: Sequence[Algorithm],
    device: torch.device,
    propagate: bool,
) -> None:
    """Count tokens, passes, and the bytes that batches and statistics hold."""
    staged = propagate and any(algorithm.needs.staged for algorithm in algorithms)
    passes = max(algorithm.needs.passes for algorithm in algorithms)
    transforming = sum(a.needs.passes for a in algorithms if a.transforms and a.needs.sees)
    at_once = ThreadPool.on(device).count * options.batch_size * options.sequence_length  # tokens
    plan.samples = options.num_calibration_samples
    plan.tokens = plan.samples * options.sequence_length  # at most
    plan.passes = transforming + passes + (0.5 if staged else 1 if propagate else 0)
    plan.passes += sum(algorithm.finishing_passes for algorithm in algorithms)
    plan.passes += sum(a.tuning_passes(options.num_calibration_samples) for a in algorithms)
    plan.state_bytes = sum(algorithm.memory(plan) for algorithm in algorithms)
    plan.waiting = _waiting_bytes(
        plan, holding_budget(device) if staged else CONCURRENT_BYTES, at_once
    )


def _waiting_bytes(plan: Plan, budget: int, least: int) -> int:
    """Estimate the bytes held by batches that wait before the widest module of a layer.

    A batch holds that module's input in fp32, the layer's input, the hidden state and its norm.

    least: tokens in flight whatever the budget, one batch per thread
    """
    widest = max((planned.shape[1] for planned in plan.quantized), default=0)
    rate = 4 * (3 * plan.hidden + widest)
    return min(plan.tokens * rate, max(budget, least * rate))


def _beside(left: Left, heads: Mapping[str, str], model: Any) -> Left:
    """Return an entry of the plan, for an untied head with the bytes that it takes from now on."""
    if left.name not in heads or left.nbytes:
        return left
    weight = model.get_submodule(heads[left.name]).weight
    nbytes = weight.numel() * weight.dtype.itemsize
    return replace(left, nbytes=nbytes, reason=f"stored beside {heads[left.name]}, unquantized")


def rewrites_first(algorithms: Sequence[Algorithm]) -> list[str]:
    """Return an error for each algorithm that would rewrite tensors after others changed them."""
    found = []
    for index, algorithm in enumerate(algorithms):
        before = [each for each in algorithms[:index] if not each.rewrites]
        if algorithm.rewrites and before:
            found.append(
                f"{type(algorithm.modifier).__name__} changes the model before anything else: move "
                f"it before {type(before[0].modifier).__name__}"
            )
    return found


def _needs_of_blocks(options: Options, algorithms: Sequence[Algorithm]) -> list[str]:
    """Return an error for each algorithm that needs blocks, if the model runs as a whole."""
    if options.route != "basic":
        return []
    return [
        f'{type(algorithm.modifier).__name__} works block by block, but pipeline="basic" runs '
        "the model as a whole: remove the pipeline option"
        for algorithm in algorithms
        if algorithm.needs.blocks
    ]


def _needs_of_finishing(
    options: Options, recipe: Recipe, algorithms: Sequence[Algorithm]
) -> list[str]:
    """Return errors for algorithms that work on the complete checkpoint where none can be."""
    quantizing = [m.quantization_config() is not None for m in recipe.modifiers]
    found = []
    for index, algorithm in enumerate(algorithms):
        if not algorithm.finishes:
            continue
        name = type(algorithm.modifier).__name__
        if isinstance(options.model, Module):
            found.append(
                f"{name} compares the written checkpoint with the original's files, but a loaded "
                "module was passed: pass its folder and output_dir"
            )
        elif options.output_dir is None and not options.dry_run:
            found.append(f"{name} works on the written checkpoint: pass output_dir")
        if algorithm.needs.samples and options.statistics is not None:
            found.append(f"{name} needs samples, not statistics=: pass dataset= instead")
        if any(quantizing[index:]):
            found.append(f"{name} works on the quantized model: move it to the end of the recipe")
    return found


def _finishing_layers(route: Route, algorithms: Sequence[Algorithm]) -> list[str]:
    """Return an error for each algorithm that runs the checkpoint, if its layers cannot."""
    return [
        f"{type(algorithm.modifier).__name__} runs layer by layer, but {route.text}: remove it, or "
        'pipeline="basic" if that asks so'
        for algorithm in algorithms
        if algorithm.finishes and algorithm.needs.samples and route.whole
    ]


def _taken_names(plan: Plan, source: Source) -> list[str]:
    """Return an error for each tensor of the source whose name the checkpoint would reuse."""
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
                f"{key}.{taken[0]} is in {source.shards.folder} already; pass the checkpoint that "
                "it was made from, or ignore the module"
            )
    return found


def _without_names(plan: Plan, source: Source) -> list[str]:
    """Return an error if weights have no tensor of their own in the files, only a part of one."""
    if source.shards is None or plan.errors:
        return []
    weights = {p.name: source.key(f"{p.name}.weight") for p in plan.quantized if p.scheme.weights}
    unnamed = [name for name, key in weights.items() if key not in source.shards]
    if not unnamed:
        return []
    return [
        f"{count(len(unnamed), 'module')} such as {unnamed[0]}: no tensor in "
        f"{source.shards.folder} is the weight alone, so it cannot be replaced there; load the "
        "model with transformers and pass the module, or ignore them"
    ]


def _note_unknown(plan: Plan, source: Source) -> None:
    """List the tensors of the files that the model class does not know; they are copied."""
    for name in source.unknown():
        assert source.shards is not None
        info = source.shards.info(name)
        plan.source_bytes += info.nbytes
        reason = f"not part of {type(source.model).__name__}, copied"
        plan.left.append(Left(name.removesuffix(".weight"), info.shape, info.nbytes, reason))
