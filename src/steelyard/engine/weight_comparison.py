"""Compares observers and schemes on the same weights, in one pass over the files.

Each weight is read once, and each combination quantizes it as a run would: layers that share a
scale are quantized together, and the error is that of the stored weight. Nothing is written.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from steelyard.checkpoint import CheckpointView
from steelyard.engine.progress import progress
from steelyard.engine.stream import quantize
from steelyard.engine.stream_jobs import Job, jobs_of
from steelyard.errors import OptionError, PlanError
from steelyard.kernels.squares import sum_of_squares
from steelyard.model.placement import placement_of
from steelyard.model.source import Source
from steelyard.modifiers import QuantizationModifier
from steelyard.modifiers.observer_choice import ObserverChoice
from steelyard.observers import Observer
from steelyard.plan.plan import Plan, Planned, make_plan

__all__ = ["Case", "Comparison", "by_depth", "compare", "layer_of", "snr"]


@dataclass
class Case:
    """One scheme with one observer.

    stored_bytes: size of all weights that the scheme quantizes, including those not compared
    errors:       module -> squared error of the stored weight over the weight's sum of squares
    refused:      why the scheme does not fit the model; then there are no errors
    """

    scheme: str
    observer: str
    stored_bytes: int | None = None
    bits_per_weight: float | None = None
    seconds: float = 0.0
    errors: dict[str, float] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)

    @property
    def label(self) -> str:
        return f"{self.scheme} {self.observer}"


@dataclass
class Comparison:
    """The errors of all cases on the same weights.

    energies: module -> sum of squares of its weight
    """

    folder: Path
    cases: list[Case]
    energies: dict[str, float] = field(default_factory=dict)

    def error(self, case: Case, modules: Iterable[str] | None = None) -> float | None:
        """Return the summed squared error of modules over their sum of squares."""
        names = [n for n in (case.errors if modules is None else modules) if n in case.errors]
        energy = sum(self.energies[name] for name in names)
        noise = sum(case.errors[name] * self.energies[name] for name in names)
        return (noise / energy if energy else 0.0) if names else None

    def layers(self) -> dict[str, list[str]]:
        """Return the modules of each layer by depth; each module outside of layers on its own."""
        found: dict[str, list[str]] = {}
        for name in self.energies:
            found.setdefault(layer_of(name) or name, []).append(name)
        return {layer: found[layer] for layer in by_depth(found)}

    def as_dict(self) -> dict[str, Any]:
        """Return the comparison as JSON types."""
        return {
            "model": str(self.folder),
            "cases": [
                {
                    "scheme": case.scheme,
                    "observer": case.observer,
                    "bytes": case.stored_bytes,
                    "bits_per_weight": case.bits_per_weight,
                    "seconds": case.seconds,
                    "error": (error := self.error(case)),
                    "snr_db": snr(error),
                    "refused": case.refused,
                    "layers": {
                        layer: {"error": (e := self.error(case, names)), "snr_db": snr(e)}
                        for layer, names in self.layers().items()
                        if not case.refused
                    },
                    "modules": {
                        name: {"error": e, "snr_db": snr(e)} for name, e in case.errors.items()
                    },
                }
                for case in self.cases
            ],
        }


def snr(error: float | None) -> float | None:
    """Return the signal-to-noise ratio in decibels; None if there is no noise.

    >>> snr(0.01)
    20.0
    """
    return -10 * math.log10(error) if error else None


def layer_of(name: str) -> str | None:
    """Return the decoder layer that a module is in.

    >>> layer_of("model.layers.3.mlp.experts.7.up_proj")
    'model.layers.3'
    """
    parts = name.split(".")
    at = next((i for i, part in enumerate(parts) if part.isdecimal()), None)
    return None if at is None else ".".join(parts[: at + 1])


def by_depth(layers: Iterable[str]) -> list[str]:
    """Return layers in numerical order, one stack of layers after the other.

    Files list tensors in alphabetical order, in which layer 10 comes before layer 2.

    >>> by_depth(["model.layers.0", "model.layers.10", "model.layers.2", "lm_head"])
    ['model.layers.0', 'model.layers.2', 'model.layers.10', 'lm_head']
    """
    places: dict[str, tuple[str, int]] = {}
    for layer in layers:
        stack, _, number = layer.rpartition(".")
        places[layer] = (stack, int(number)) if number.isdecimal() else (layer, 0)
    stacks = list(dict.fromkeys(stack for stack, _ in places.values()))
    return sorted(places, key=lambda layer: (stacks.index(places[layer][0]), places[layer][1]))


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
    device: Any = "auto",
    show_progress: bool | None = None,
) -> Comparison:
    """Quantize the weights of a model in every combination of `schemes` and `observers`.

    model:  a folder, or a name on the hub
    changes: group_size and num_bits of all schemes, instead of their own
    ignore: as in a recipe
    keep:   whether to compare the module of this name
    layers: number of decoder layers, evenly spread over the model; None compares all modules
    device: where to quantize: auto, cpu, or an accelerator such as cuda, cuda:1 or xpu
    """
    for name in observers:
        if getattr(Observer.get_value_from_registry(name), "needs_importance", False):
            raise OptionError(
                f"{name} weights columns by calibration data, but compare reads weights only: "
                "remove it, or quantize with it and evaluate the result"
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
    total = sum(view.info(name).nbytes for group in groups for name in group)
    with view, progress("comparing", total, show_progress, unit="bytes") as advance:
        for group in groups:
            weights = {name: placement.bring(view.read(name)) for name in group}
            for name, weight in weights.items():
                if (module := name.removesuffix(".weight")) in wanted:
                    comparison.energies[module] = _energy(weight)
            for case, jobs in tasks:
                started = time.perf_counter()
                for job in {jobs[n].names: jobs[n] for n in group if n in jobs}.values():
                    found = quantize(job.modules, [weights[name] for name in job.names], {})
                    for planned, (_, result) in zip(job.modules, found, strict=True):
                        if planned.name in wanted and result.error is not None:
                            case.errors[planned.name] = result.error
                case.seconds += time.perf_counter() - started
            advance(sum(view.info(name).nbytes for name in group))
    return comparison


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
