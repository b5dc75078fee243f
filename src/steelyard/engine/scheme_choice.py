"""Replaces a bit budget in a recipe by the schemes that it stands for, before the run is planned.

    [BitBudgetModifier(bits=4.5), GPTQModifier(scheme="W4A16")]
    -> [GPTQModifier(config_groups={"w8a16": ..., "group_0": ...})]

Everything after that, from the plan to the report, sees explicit config groups. With data, each
unit is scored under each scheme by one backward pass (`algorithms.scheme_scores`), else by the
error of its weights. The first rank chooses for all.

The recipe that is written states the choice in comments, with a digest of its inputs: a run that
resumes takes it from there instead of choosing again.
"""

from __future__ import annotations

from collections.abc import Sequence

from compressed_tensors.quantization import QuantizationScheme

from steelyard.data.tokenizer import checked_tokenizer
from steelyard.distributed import Ranks
from steelyard.engine.calibration_samples import CalibrationLoader
from steelyard.engine.choice_record import (
    choice_digest,
    earlier_choice,
    recipe_of_choice,
    with_comments,
)
from steelyard.engine.planning import streams
from steelyard.engine.prepared_options import open_source
from steelyard.engine.run_options import Options
from steelyard.engine.unit_choice import UnitChoice
from steelyard.errors import PlanError, RecipeError
from steelyard.formats.descriptions import scheme_label
from steelyard.model.placement import placement_of
from steelyard.modifiers import Modifier, QuantizationModifier
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.plan.budget_units import BudgetUnit, budget_units
from steelyard.plan.plan import make_plan
from steelyard.recipes import Recipe
from steelyard.recipes.dump import dump_modifiers
from steelyard.recipes.mixed import with_schemes

__all__ = ["chosen_recipe", "with_chosen_schemes"]


def with_chosen_schemes(recipe: Recipe, options: Options, load: CalibrationLoader) -> Recipe:
    """Return a recipe without a bit budget; every rank must call this."""
    budget, rest = _split(recipe.modifiers)
    if budget is None:
        return recipe
    plain = Recipe(rest, dump_modifiers(rest))
    algorithms = plain.algorithms()
    ranks = Ranks.current()
    streamed = not load.given and streams(options, plain, algorithms)
    source = open_source(options, streamed, placement_of(options.device, options.model))
    with source.unstacked():
        tokenizer = checked_tokenizer(
            options.tokenizer or options.processor, source, options.trust_remote_code_model
        )
        plan = make_plan(source.model, modifiers=rest)
        if plan.errors:  # which the run reports
            return plain
        units = budget_units(plan, budget, source.model)
        if not units:
            raise PlanError(
                "BitBudgetModifier has no module in a layer whose scheme may change: change its "
                "targets or ignore"
            )
        samples = load(source, tokenizer) if load.given else None
        digest = choice_digest(recipe.text, source, samples)
        text = earlier_choice(options, digest) if ranks.is_first else None
        if text is None and ranks.is_first:
            show = options.show_progress
            chosen, lines = UnitChoice(source, units, budget, algorithms, show).choose(samples)
            text = with_comments(chosen_recipe(rest, chosen), lines, digest)
        text = ranks.broadcast(text)
        source.restack([])
        source.tie()
    assert text is not None
    return recipe_of_choice(text)


def _split(modifiers: Sequence[Modifier]) -> tuple[BitBudgetModifier | None, list[Modifier]]:
    """Return the bit budget of a recipe, and the other steps."""
    budgets = [each for each in modifiers if isinstance(each, BitBudgetModifier)]
    rest = [each for each in modifiers if not isinstance(each, BitBudgetModifier)]
    if not budgets:
        return None, rest
    if len(budgets) > 1:
        raise RecipeError("the recipe has two BitBudgetModifier: keep one of them")
    quantizing = [each for each in rest if each.quantization_config() is not None]
    if len(quantizing) != 1 or not isinstance(quantizing[0], QuantizationModifier):
        names = ", ".join(type(each).__name__ for each in quantizing) or "none"
        raise RecipeError(
            "BitBudgetModifier chooses the schemes of one other step, such as QuantizationModifier "
            f"or GPTQModifier with scheme: W4A16; the recipe has {names}"
        )
    return budgets[0], rest


def chosen_recipe(
    rest: Sequence[Modifier], chosen: Sequence[tuple[BudgetUnit, QuantizationScheme | None]]
) -> str:
    """Return the recipe with the chosen schemes, as YAML."""
    members: dict[str, list[str]] = {}
    groups: dict[str, QuantizationScheme] = {}
    ignore: list[str] = []
    for unit, scheme in chosen:
        if scheme is None:
            ignore += unit.names
        elif scheme != unit.modules[0].scheme:
            group = scheme_label(scheme).replace("-", "_").lower()
            groups.setdefault(group, scheme)
            members.setdefault(group, []).extend(unit.names)
    return dump_modifiers(with_schemes(rest, members, groups, ignore))
