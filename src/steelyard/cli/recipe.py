"""Builds a recipe from the options of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from steelyard.names import WEIGHT_OBSERVER

if TYPE_CHECKING:
    from steelyard.modifiers import Modifier

__all__ = ["changes_of", "ignored_by", "recipe_from"]

HEAD = "lm_head"
DEFAULT = "W4A16"  # scheme of a bit budget


def recipe_from(
    scheme: str | None,
    recipe: str | None,
    observer: str | None = None,
    ignore: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    gptq: bool = False,
    group_size: int | None = None,
    num_bits: int | None = None,
    weigh: bool = False,
    budget: Mapping[str, Any] | None = None,
) -> Any:
    """Return modifiers for a scheme, or the recipe file; exactly one of the two is given.

    weigh:  gather importance for an observer that can use it, even if the scheme needs no data
    budget: options of a bit budget, which has W4A16 as the scheme unless one is given
    """
    if recipe is not None:
        given = {
            "--scheme": scheme,
            "--observer": observer,
            "--ignore": ignore,
            "--targets": targets,
            "--gptq": gptq,
            "--group-size": group_size,
            "--num-bits": num_bits,
            "--max-kl" if budget and "max_kl" in budget else "--bits": budget,
        }
        clash = [name for name, value in given.items() if value]
        if clash:
            raise typer.BadParameter(
                f"{clash[0]} and --recipe exclude each other: write it into the recipe"
            )
        return recipe
    if scheme is None and budget:
        scheme = DEFAULT
    if scheme is None:
        raise typer.BadParameter("one of --scheme and --recipe is missing, such as --scheme W4A16")
    from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier

    options: dict[str, Any] = {
        "ignore": ignored_by(ignore, targets),
        "weight_observer": observer or WEIGHT_OBSERVER,
        "scheme": scheme,
    }
    if targets:
        options["targets"] = list(targets)
    options |= changes_of([scheme], group_size, num_bits)
    from steelyard.errors import RecipeError
    from steelyard.modifiers.bit_budget import BitBudgetModifier
    from steelyard.modifiers.check import check_options
    from steelyard.recipes import load_recipe

    def checked(kind: type[Modifier], given: Mapping[str, Any]) -> Modifier:
        made = check_options(kind, given, ())
        if isinstance(made, list):  # without class names, which the user did not type
            raise RecipeError("; ".join(text for _, text in made))
        return made

    steps = [checked(GPTQModifier if gptq else QuantizationModifier, options)]
    if weigh and not load_recipe(steps).needs_data and _weighs(options["weight_observer"]):
        steps.insert(0, IMatrixGatherer(ignore=options["ignore"]))
    if budget:
        steps.insert(0, checked(BitBudgetModifier, budget))
    return steps if len(steps) > 1 else steps[0]


def changes_of(
    schemes: Sequence[str], group_size: int | None, num_bits: int | None
) -> dict[str, int]:
    """Return what --group-size and --num-bits change in the weights of schemes."""
    from steelyard.modifiers.schemes import CHANGES

    given = {"group_size": group_size, "num_bits": num_bits}
    changes = {name: value for name, value in given.items() if value is not None}
    for name in changes:
        for problem in filter(None, map(CHANGES[name], schemes)):
            raise typer.BadParameter(f"--{name.replace('_', '-')} {problem}")
    return changes


def ignored_by(ignore: Sequence[str] | None, targets: Sequence[str] | None = None) -> list[str]:
    """Return the names of `--ignore`, and the output head unless a target names it.

    With an empty name, the head is not added.
    """
    from compressed_tensors.utils.match import match_name

    from steelyard.checkpoint.patterns import problem_of, slow_pattern

    given = [name for name in ignore or () if name]
    heads = (HEAD, f"language_model.{HEAD}")
    problem = next(filter(None, map(problem_of, targets or ())), None)
    if problem := problem or slow_pattern(targets or (), heads):
        raise typer.BadParameter(problem)
    named = any(match_name(n, t) for t in targets or () for n in heads)
    wanted = named or "" in (ignore or ()) or HEAD in given
    return given if wanted else [HEAD, *given]


def _weighs(observer: str) -> bool:
    from steelyard.observers import Observer
    from steelyard.observers.importance_base import ImportanceObserver

    return issubclass(Observer.get_value_from_registry(observer), ImportanceObserver)
