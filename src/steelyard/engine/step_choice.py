"""Measures steps of a recipe beside others before the run is planned, and keeps the best.

    [SpinQuantModifier(rotations=["R1", "R2"]), QuantizationModifier(scheme="NVFP4")]
    -> [QuantizationModifier(scheme="NVFP4")]

A modifier lists its `candidates`. With calibration data, the first rank measures the KL divergence
of the model under each, with inputs and weights rounded (`algorithms.step_divergence`). The last
candidate is the one to beat. As with a bit budget, the run gets a recipe in which the choice is
made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from steelyard.algorithms import algorithm_of
from steelyard.algorithms.guard import is_gain, paired_gain
from steelyard.algorithms.step_divergence import StepDivergence
from steelyard.data.samples import Samples
from steelyard.data.token_rows import token_rows
from steelyard.data.tokenizer import checked_tokenizer
from steelyard.distributed import Ranks, ThreadPool
from steelyard.engine.calibration_samples import CalibrationLoader
from steelyard.engine.choice_record import (
    choice_digest,
    earlier_choice,
    recipe_of_choice,
    with_comments,
)
from steelyard.engine.planning import rewrites_first
from steelyard.engine.prepared_options import open_source, untie_heads
from steelyard.engine.progress import progress
from steelyard.engine.run_options import Options
from steelyard.errors import DataError, PipelineError
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.placement import placement_of
from steelyard.model.rewrites import rewrite_source
from steelyard.model.second_source import second_source
from steelyard.model.served_hooks import attach_rotations, made_rotation
from steelyard.model.source import Source
from steelyard.modifiers import Modifier
from steelyard.plan.plan import Plan, make_plan
from steelyard.recipes import Recipe
from steelyard.recipes.dump import dump_modifiers
from steelyard.words import count

__all__ = ["with_chosen_steps"]

SAMPLES, LENGTH = 8, 128  # at most; the beginnings of samples at equal distances

Row = dict[str, torch.Tensor]


def with_chosen_steps(recipe: Recipe, options: Options, load: CalibrationLoader) -> Recipe:
    """Return a recipe whose steps have no candidates left; every rank must call this.

    Without data, and where a run begins or ends with a file of statistics, steps stay as asked.
    """
    statistics = options.statistics is not None or options.save_statistics is not None
    asked = any(modifier.candidates() for modifier in recipe.modifiers)
    if not asked or not load.given or statistics or options.route == "datafree":
        return recipe
    ranks = Ranks.current()
    source = open_source(options, False, placement_of(options.device, options.model))
    with source.unstacked():
        tokenizer = checked_tokenizer(
            options.tokenizer or options.processor, source, options.trust_remote_code_model
        )
        plan = make_plan(source.model, modifiers=recipe.modifiers)
        plan.errors += untie_heads(options, recipe.modifiers, source.model)[1]
        plan.errors += rewrites_first(recipe.algorithms())
        if plan.errors or not plan.quantized:  # the run reports errors
            source.restack([])
            return recipe
        samples = load(source, tokenizer)
        source.restack([planned.name for planned in plan.quantized])
        text, problem = None, ""
        digest = choice_digest(recipe.text, source, samples)
        if ranks.is_first:
            text = earlier_choice(options, digest)
        if ranks.is_first and text is None:
            try:
                found, lines = StepChoice(source, plan, recipe, options).choose(samples)
                text = with_comments(dump_modifiers(found), lines, digest, recipe)
            except _NotMeasured as reason:
                problem = str(reason)
        text, problem = ranks.broadcast((text, problem))
        source.restack([])
    if text is None:
        return Recipe(recipe.modifiers, recipe.text, (*recipe.chosen, problem))
    return recipe_of_choice(text)


class _NotMeasured(Exception):
    """Why the candidates of a recipe cannot be compared; its steps stay as asked."""


class StepChoice:
    """The choice for the steps of one recipe that have candidates, one after another."""

    def __init__(self, source: Source, plan: Plan, recipe: Recipe, options: Options) -> None:
        self.source = source
        self.modifiers = recipe.modifiers
        self.options = options
        algorithms = {
            index: algorithm_of(modifier)
            for index, modifier in enumerate(recipe.modifiers)
            if not modifier.chooses_schemes
        }
        self.weighs = any(each.needs.importance for each in algorithms.values())
        self.schemes = {planned.name: planned.scheme for planned in plan.quantized}
        self.nearest = frozenset(
            planned.name
            for planned in plan.quantized
            if planned.scheme.weights is not None and algorithms[planned.modifier].rounds_to_nearest
        )
        rounding = [each for each in algorithms.values() if not each.rounds_to_nearest]
        self.compensating = " and ".join(type(each.modifier).__name__ for each in rounding)

    def choose(self, samples: Samples) -> tuple[list[Modifier], list[str]]:
        """Return the chosen steps, and lines that say how they were chosen."""
        asking = [each for each in self.modifiers if each.candidates()]
        names = " and ".join(type(each).__name__ for each in asking)
        rounded = self._rounded()
        if not rounded:
            raise _NotMeasured(
                f"{names} was not compared on samples: no input is rounded, and "
                f"{self.compensating} makes up for the rounding of weights"
            )
        try:
            rows = [self.source.placement.bring_all(row) for row in _beginnings(samples, names)]
            return self._measured(asking, rows, rounded)
        except (DataError, PipelineError) as error:
            reason = str(error).partition("; ")[0]
            raise _NotMeasured(f"{names} was not compared on samples: {reason}") from error

    def _rounded(self) -> str:
        """Return what a measurement rounds; nothing if the recipe gives it nothing to round."""
        inputs = any(s.input_activations is not None for s in self.schemes.values())
        parts = [*(["inputs"] if inputs else []), *(["weights"] if self.nearest else [])]
        return " and ".join(parts)

    def _measured(
        self, asking: Sequence[Modifier], rows: Sequence[Row], rounded: str
    ) -> tuple[list[Modifier], list[str]]:
        chosen, lines = list(self.modifiers), []
        pool = ThreadPool.on(self.source.placement.device)
        model = LayerwiseModel(self.source, "base")
        measuring = StepDivergence(model, rows, pool, self.schemes, self.nearest, self.weighs)
        total = 1 + measuring.passes * sum(len(each.candidates()) for each in asking)
        show = self.options.show_progress
        with pool, measuring, progress("comparing steps", total, show, unit="work") as advance:
            measuring.start(advance)
            for step in asking:
                place = next(i for i, each in enumerate(chosen) if each is step)
                found: dict[str, list[float]] = {}
                for label, steps in step.candidates().items():
                    tried = [*chosen[:place], *steps, *chosen[place + 1 :]]
                    changed = LayerwiseModel(self._changed(tried), "changed")
                    found[label] = measuring.divergences(changed, advance)
                best = best_of(found)
                chosen[place : place + 1] = step.candidates()[best]
                lines.append(
                    f"{type(step).__name__}: {best}. KL divergence on "
                    f"{count(len(rows), 'sample')} with {rounded} rounded: {_figures(found)}"
                )
        return chosen, lines

    def _changed(self, modifiers: Sequence[Modifier]) -> Source:
        """Return the model as the steps before any data make it."""
        trusted = self.options.trust_remote_code_model
        source = second_source(self.source, self.schemes, trusted)
        source.untie(untie_heads(self.options, modifiers, source.model)[0])
        for modifier in modifiers:
            algorithm = algorithm_of(modifier)
            if algorithm.rewrites:
                rewrite_source(source, algorithm.rewrite(source, []))
            for rotation in modifier.served_rotations():
                attach_rotations(source.model, rotation, made_rotation)
        return source


def best_of(found: Mapping[str, Sequence[float]]) -> str:
    """Return the label with the least divergence; the last, unless that wins more than noise.

    found: of each candidate, the divergence of each sample
    """
    last = list(found)[-1]
    least = min(found, key=lambda label: sum(found[label]))
    return least if is_gain(found[last], found[least]) else last


def _figures(found: Mapping[str, Sequence[float]]) -> str:
    """Return the mean divergences, with differences from the last and their standard errors."""
    *others, last = found
    parts = []
    for label in others:
        gain, error = paired_gain(found[last], found[label])
        parts.append(f"{label} {_mean(found[label]):.4f} ({-gain:+.4f} ± {error:.4f})")
    return ", ".join([*parts, f"{last} {_mean(found[last]):.4f}"])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _beginnings(samples: Samples, names: str) -> list[Row]:
    """Return the beginnings of some samples, (1, tokens)."""
    rows = token_rows(samples, names)
    if not rows:
        raise DataError("no sample has two tokens")
    many = min(SAMPLES, len(rows))
    some = [rows[i * len(rows) // many] for i in range(many)]
    return [{name: ids[:, :LENGTH] for name, ids in row.items()} for row in some]
