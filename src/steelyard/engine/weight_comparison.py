"""Compares observers and schemes on the same weights, in one pass over the files.

Each weight is read once, and each combination quantizes it as a run would: layers that share a
scale are quantized together, and the error is that of the stored weight; with data, that of the
module's output. Nothing is written.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import CheckpointView
from steelyard.engine.compared_weights import Case, Comparison, by_depth, layer_of
from steelyard.engine.layer_inputs import InputMoment, LayerInputs
from steelyard.engine.progress import progress
from steelyard.engine.stream import quantize
from steelyard.engine.stream_jobs import Job, jobs_of
from steelyard.errors import OptionError, PlanError
from steelyard.formats import stored_as
from steelyard.kernels.squares import sum_of_squares
from steelyard.model.placement import placement_of
from steelyard.model.source import Source
from steelyard.modifiers import QuantizationModifier
from steelyard.modifiers.observer_choice import ObserverChoice
from steelyard.observers import Observer
from steelyard.plan.plan import Plan, Planned, make_plan

__all__ = ["compare"]


def compare(
    model: str | Path,
    schemes: Sequence[str],
    observers: Sequence[str],
    *,
    changes: Mapping[str, int] | None = None,
    ignore: Sequence[str] = ("lm_head",),
    keep: Callable[[str], bool] = lambda name: True,
    layers: int | None = None,
    model_revision: str | None = None,
    data: Any = None,
    num_samples: int = 128,
    max_seq_length: int = 2048,
    batch_size: int = 1,
    text_column: str = "text",
    split: str | None = None,
    seed: int = 0,
    device: Any = "auto",
    trust_remote_code_model: bool = False,
    show_progress: bool | None = None,
) -> Comparison:
    """Quantize the weights of a model in every combination of `schemes` and `observers`.

    model:  a folder, or a name on the hub
    changes: group_size and num_bits of all schemes, instead of their own
    ignore: as in a recipe
    keep:   whether to compare the module of this name
    layers: number of decoder layers, evenly spread over the model; None compares all modules
    data:   text to run the model on, as in `evaluate`: then errors are those of outputs, and
            observers weigh columns by it as `oneshot` with a dataset does
    device: where to quantize: auto, cpu, or an accelerator such as cuda, cuda:1 or xpu
    """
    for name in observers if data is None else ():
        if getattr(Observer.get_value_from_registry(name), "needs_importance", False):
            raise OptionError(
                f"{name} weights columns by calibration data, but there is none: give it data, or "
                "remove it"
            )
    placement = placement_of(device, model)
    source = Source.from_files(model, model_revision)
    assert source.shards is not None
    cases = [Case(scheme.upper(), observer) for scheme in schemes for observer in observers]
    plans = [_plan(case, source, ignore, changes or {}) for case in cases]
    view = source.shards
    wanted = _wanted(plans, keep, layers)
    comparison = Comparison(view.folder, cases)
    _refuse_nothing(comparison, wanted)
    for case, plan in zip(cases, plans, strict=True):
        if not case.refused:
            plan.quantized = [_weights_alone(p) for p in plan.quantized]
            source.restack([planned.name for planned in plan.quantized])
            source.untie(plan.untied)
    tasks = [
        (case, _jobs(view, plan, wanted))
        for case, plan in zip(cases, plans, strict=True)
        if not case.refused
    ]
    groups = _groups(view, [jobs for _, jobs in tasks])
    inputs = None
    if data is not None:
        inputs = LayerInputs(
            model,
            data,
            num_samples=num_samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            split=split,
            seed=seed,
            device=device,
            trust_remote_code_model=trust_remote_code_model,
        )
        comparison.data = inputs.description
    total = sum(view.info(name).nbytes for group in groups for name in group)
    with view, progress("comparing", total, show_progress, unit="bytes") as advance:
        for group, moments in _steps(groups, inputs, source, wanted, comparison.unseen, advance):
            weights = {name: placement.bring(view.read(name)) for name in group}
            for name, weight in weights.items():
                module = _module(name)
                if module not in wanted:
                    continue
                if inputs is None:
                    comparison.energies[module] = _energy(weight)
                elif module in moments:
                    comparison.energies[module] = moments[module].energy(weight)
                else:
                    comparison.unseen.append(module)
            for case, jobs in tasks:
                started = time.perf_counter()
                for job in {jobs[n].names: jobs[n] for n in group if n in jobs}.values():
                    _run(case, job, [weights[name] for name in job.names], moments, wanted)
                case.seconds += time.perf_counter() - started
            advance(sum(view.info(name).nbytes for name in group))
    if not comparison.energies:
        raise PlanError(
            f"no token of the data reaches {comparison.unseen[0]} and the others: pass more data, "
            "or compare them without"
        )
    return comparison


def _run(
    case: Case,
    job: Job,
    weights: Sequence[torch.Tensor],
    moments: Mapping[str, InputMoment],
    wanted: Mapping[str, None],
) -> None:
    """Quantize the weights of a job, and note the errors.

    moments: of their inputs; empty without data
    """
    importance = {name: (moment.squares, moment.tokens) for name, moment in moments.items()}
    found = quantize(job.modules, weights, importance)
    for planned, weight, (stored, result) in zip(job.modules, weights, found, strict=True):
        if planned.name not in wanted or result.error is None:
            continue
        if moments and planned.name not in moments:
            continue
        case.errors[planned.name] = result.error
        if (moment := moments.get(planned.name)) is not None:
            rounded = stored_as(planned.scheme).decode(stored, planned.scheme)
            energy = moment.energy(weight)
            noise = moment.energy(rounded.to(weight.device) - weight.float())
            case.errors[planned.name] = noise / energy if energy else 0.0


def _steps(
    groups: Sequence[tuple[str, ...]],
    inputs: LayerInputs | None,
    source: Source,
    wanted: Mapping[str, None],
    unseen: list[str],
    advance: Callable[..., None],
) -> Iterator[tuple[tuple[str, ...], Mapping[str, InputMoment]]]:
    """Yield the groups of weights, and with data the moments of their inputs.

    unseen: filled with the modules of groups that no token reaches
    """
    if inputs is None:
        yield from ((group, {}) for group in groups)
        return
    left = list(groups)
    keys = {source.module_key(name): name for name in wanted}
    with contextlib.closing(inputs.walk(keys, advance)) as walk:
        for found in walk:
            moments = {keys[key]: moment for key, moment in found.items()}
            ready = [g for g in left if any(_module(name) in moments for name in g)]
            left = [g for g in left if g not in ready]
            yield from ((group, moments) for group in ready)
    unseen += [module for group in left for name in group if (module := _module(name)) in wanted]


def _module(name: str) -> str:
    return name.removesuffix(".weight")


def _plan(case: Case, source: Source, ignore: Sequence[str], changes: Mapping[str, int]) -> Plan:
    modifier = QuantizationModifier(
        scheme=case.scheme,
        ignore=list(ignore),
        weight_observer=ObserverChoice(name=case.observer),
        **changes,
    )
    config = modifier.quantization_config()
    assert config is not None
    plan = make_plan(source.model, config, modifiers=[modifier])
    plan.quantized = [p for p in plan.quantized if p.scheme.weights is not None]
    case.refused = list(plan.errors)
    if not plan.quantized and not case.refused:
        case.refused = [f"{case.scheme} quantizes no weight"]
    weights = sum(math.prod(p.shape) for p in plan.quantized)
    if not case.refused:
        case.stored_bytes = sum(p.stored_bytes for p in plan.quantized)
        case.bits_per_weight = 8 * case.stored_bytes / weights
    return plan


def _wanted(
    plans: Sequence[Plan], keep: Callable[[str], bool], layers: int | None
) -> dict[str, None]:
    """Return the modules to compare, in the order of the model."""
    names = dict.fromkeys(p.name for plan in plans for p in plan.quantized if keep(p.name))
    if layers is None:
        return names
    known = by_depth(layer for name in names if (layer := layer_of(name)))
    step = (len(known) - 1) / max(layers - 1, 1)
    chosen = known if len(known) <= layers else [known[round(i * step)] for i in range(layers)]
    return {name: None for name in names if layer_of(name) in chosen}


def _refuse_nothing(comparison: Comparison, wanted: Mapping[str, None]) -> None:
    """Raise if no case can run."""
    if not wanted:
        raise PlanError(f"no weight of {comparison.folder} is left to compare")
    if all(case.refused for case in comparison.cases):
        lines = dict.fromkeys(f"  - {c.scheme}: {r}" for c in comparison.cases for r in c.refused)
        raise PlanError("no scheme fits the model:\n" + "\n".join(lines))


def _weights_alone(planned: Planned) -> Planned:
    scheme = planned.scheme.model_copy(
        update={"input_activations": None, "output_activations": None, "format": None}
    )
    return replace(planned, scheme=scheme)


def _jobs(view: CheckpointView, plan: Plan, wanted: Mapping[str, None]) -> dict[str, Job]:
    """Return the job of each weight; a job also reads weights that share a scale with it."""
    jobs = [j for j in jobs_of(view, plan) if any(m.name in wanted for m in j.modules)]
    return {name: job for job in jobs for name in job.names}


def _groups(view: CheckpointView, cases: Sequence[Mapping[str, Job]]) -> list[tuple[str, ...]]:
    """Return the weights in the order of the files, grouped if any case quantizes them together."""
    largest: dict[str, tuple[str, ...]] = {}
    for jobs in cases:
        for name, job in jobs.items():
            if len(job.names) > len(largest.get(name, ())):
                largest[name] = job.names
    return list(dict.fromkeys(largest[name] for name in view.names() if name in largest))


def _energy(weight: torch.Tensor) -> float:
    energy = float(sum_of_squares(weight).sum(dtype=torch.float64))
    return energy if math.isfinite(energy) else float(weight.double().square().sum())
