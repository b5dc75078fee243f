"""The units of a bit budget: modules that a server gives one scheme, and the schemes they may have.

A unit is in the budget if it lies in a layer and the modifier targets all of its modules. Heads and
embeddings keep the scheme that the recipe gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from steelyard.formats.scheme_bits import scheme_with_bits
from steelyard.fusion import serving_units
from steelyard.model.matching import matches
from steelyard.modifiers.bit_budget import UNQUANTIZED, BitBudgetModifier
from steelyard.plan.plan import Plan, Planned

__all__ = ["BudgetUnit", "budget_units"]


@dataclass(frozen=True)
class BudgetUnit:
    """Modules that get one scheme.

    widths:  bits of a weight in each scheme, rising; 16 for unquantized
    schemes: None for unquantized
    """

    modules: tuple[Planned, ...]
    widths: tuple[int, ...]
    schemes: tuple[QuantizationScheme | None, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(module.name for module in self.modules)

    @property
    def weights(self) -> int:
        return sum(module.shape[0] * module.shape[1] for module in self.modules)

    @property
    def costs(self) -> list[int]:
        """Bits of all weights under each scheme, without scales."""
        unquantized = self.modules[0].dtype.itemsize * 8
        return [self.weights * (unquantized if w == UNQUANTIZED else w) for w in self.widths]

    def stored_bits(self, option: int) -> int:
        """Return the bits that a scheme stores, with scales."""
        scheme = self.schemes[option]
        if scheme is None:
            return self.costs[option]
        as_stored = (
            Planned(each.name, each.shape, each.dtype, scheme, each.group) for each in self.modules
        )
        return 8 * sum(each.stored_bytes for each in as_stored)


def budget_units(plan: Plan, modifier: BitBudgetModifier, model: Any) -> list[BudgetUnit]:
    """Return the units of a plan that a bit budget may give other schemes."""
    planned = {p.name: p for p in plan.quantized if p.scheme.weights is not None}
    modules = dict(model.named_modules())

    def is_free(name: str) -> bool:
        def hit(patterns: list[str]) -> bool:
            return any(matches(model, name, modules[name], pattern) for pattern in patterns)

        in_layer = any(part.isdecimal() for part in name.split("."))
        return in_layer and hit(modifier.targets) and not hit(modifier.ignore)

    found = []
    for names in serving_units(planned):
        if all(map(is_free, names)):
            members = tuple(planned[name] for name in names)
            choices = dict(_choices(members[0].scheme, modifier.bit_widths))
            found.append(BudgetUnit(members, tuple(choices), tuple(choices.values())))
    return [unit for unit in found if unit.widths]


def _choices(
    scheme: QuantizationScheme, widths: list[int] | None
) -> Iterator[tuple[int, QuantizationScheme | None]]:
    assert scheme.weights is not None
    own = scheme.weights.num_bits
    for bits in widths or sorted({own, max(own, 8), UNQUANTIZED}):
        other = None if bits == UNQUANTIZED else scheme_with_bits(scheme, bits)
        if other is not None or bits == UNQUANTIZED:
            yield bits, other
