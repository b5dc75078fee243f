"""Losses of the units of a bit budget without data: the errors of their weights."""

from __future__ import annotations

from collections.abc import Sequence

from steelyard.algorithms.rounding_ahead import rounded_as
from steelyard.engine.progress import progress
from steelyard.model.source import Source
from steelyard.plan.budget_units import BudgetUnit

__all__ = ["weight_losses"]


def weight_losses(
    source: Source, units: Sequence[BudgetUnit], show: bool | None
) -> list[list[float]]:
    """Return the relative squared errors of each unit under each scheme, summed over modules.

    By the linearity of small errors, equal relative errors of two matrices harm about alike.
    """
    found = [[0.0] * len(unit.schemes) for unit in units]
    total = sum(unit.weights * len(unit.schemes) for unit in units)
    with progress("choosing schemes", total, show, unit="work") as advance:
        for unit, errors in zip(units, found, strict=True):
            for planned in unit.modules:
                module = source.model.get_submodule(planned.name)
                with source.loaded(module, planned.name):
                    weight = module.weight.data.float()
                    energy = float(weight.double().square().sum()) or 1.0
                    for k, scheme in enumerate(unit.schemes):
                        if scheme is not None:
                            name = {planned.name: module}
                            rounded = rounded_as({planned.name: scheme}, name, planned.dtype)
                            lost = (rounded[planned.name] - weight).double().square().sum()
                            errors[k] += float(lost) / energy
                        advance(weight.numel(), planned.name)
    return found
