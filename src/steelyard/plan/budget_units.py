"""The units of a bit budget: modules that a server gives one scheme, and the schemes they may have.

A unit is in the budget if it lies in a layer and the modifier targets all of its modules. Heads and
embeddings keep the scheme that the recipe gives them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import QuantizationScheme

from steelyard.formats.scheme_bits import scheme_with_bits
from steelyard.fusion import serving_units
from steelyard.model.matching import matches
from steelyard.modifiers.bit_budget import UNQUANTIZED, BitBudgetModifier
from steelyard.plan.plan import Plan, Planned

__all__ = ["BudgetUnit", "budget_units", "default_widths", "needs_cuda"]

_ANYWHERE = (4, 8, UNQUANTIZED)  # bits that vLLM serves on every device


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
    def kind(self) -> tuple[str, ...]:
        """The names of its modules without the numbers of layers and experts."""
        kinds = (".".join(p for p in n.split(".") if not p.isdecimal()) for n in self.names)
        return tuple(dict.fromkeys(kinds))

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
    for bits in widths or default_widths(scheme):
        other = None if bits == UNQUANTIZED else scheme_with_bits(scheme, bits)
        if other is not None or bits == UNQUANTIZED:
            yield bits, other


def needs_cuda(widths: Iterable[int]) -> list[int]:
    """Return the widths that vLLM serves on CUDA alone."""
    return sorted(set(widths) - set(_ANYWHERE))


def default_widths(scheme: QuantizationScheme) -> list[int]:
    """Return the widths that a budget chooses from.

    >>> from compressed_tensors.quantization import preset_name_to_scheme
    >>> [default_widths(preset_name_to_scheme(n, ["Linear"])) for n in ("W4A16", "W8A8")]
    [[4, 5, 6, 8, 16], [8, 16]]
    """
    args = scheme.weights
    assert args is not None
    own = args.num_bits
    between = range(own, 7) if serves_all_widths(scheme) else ()
    return sorted({own, *between, max(own, 8), UNQUANTIZED})


def serves_all_widths(scheme: QuantizationScheme) -> bool:
    """Whether vLLM serves weights of 2 to 8 bits under a scheme, on CUDA: symmetric integers."""
    args = scheme.weights
    if args is None or scheme.input_activations is not None:
        return False
    return args.type == "int" and args.symmetric and args.strategy in ("group", "channel")
