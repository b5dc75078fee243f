"""From the options of a command to a recipe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

__all__ = ["recipe_from"]

DEFAULT_OBSERVER = "optimal"
DEFAULT_IGNORE = ("lm_head",)


def recipe_from(
    scheme: str | None,
    recipe: str | None,
    observer: str | None = None,
    ignore: Sequence[str] | None = None,
    targets: Sequence[str] | None = None,
    gptq: bool = False,
    group_size: int | None = None,
    weigh: bool = False,
) -> Any:
    """Return modifiers made of a scheme, or the recipe file; exactly one of the two is given.

    weigh: gather importance for an observer that can use it, also where the scheme needs no data
    """
    if recipe is not None:
        given = {
            "--scheme": scheme,
            "--observer": observer,
            "--ignore": ignore,
            "--targets": targets,
            "--gptq": gptq,
            "--group-size": group_size,
        }
        clash = [name for name, value in given.items() if value]
        if clash:
            raise typer.BadParameter(
                f"{clash[0]} and --recipe exclude each other: write it into the recipe"
            )
        return recipe
    if scheme is None:
        raise typer.BadParameter("one of --scheme and --recipe is missing, such as --scheme W4A16")
    from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier

    options: dict[str, Any] = {
        "ignore": [name for name in (ignore or DEFAULT_IGNORE) if name],
        "weight_observer": observer or DEFAULT_OBSERVER,
    }
    if group_size is not None:
        options["config_groups"] = {"group_0": _regrouped(scheme, targets, group_size)}
    else:
        options["scheme"] = scheme
        if targets:
            options["targets"] = list(targets)
    from pydantic import ValidationError

    from steelyard.errors import RecipeError

    try:
        made = GPTQModifier(**options) if gptq else QuantizationModifier(**options)
    except ValidationError as error:
        causes = "; ".join(e["msg"].removeprefix("Value error, ") for e in error.errors())
        raise RecipeError(causes) from None
    if weigh and not made.needs_data and _weighs(options["weight_observer"]):
        return [IMatrixGatherer(ignore=options["ignore"]), made]
    return made


def _weighs(observer: str) -> bool:
    from steelyard.observers import Observer
    from steelyard.observers.importance import ImportanceObserver

    return issubclass(Observer.get_value_from_registry(observer), ImportanceObserver)


def _regrouped(scheme: str, targets: Sequence[str] | None, group_size: int) -> Any:
    from compressed_tensors.quantization import preset_name_to_scheme

    found = preset_name_to_scheme(scheme, list(targets or ["Linear"]))
    weights = found.weights
    if weights is None or weights.strategy != "group" or weights.scale_dtype is not None:
        raise typer.BadParameter(
            f"--group-size does not apply to {scheme}, whose groups are fixed or missing"
        )
    changed = weights.model_copy(update={"group_size": group_size})
    return found.model_copy(update={"weights": changed})
