"""Assigns modules to the modifiers that quantize them, and merges the modifiers' configs.

Each modifier matches its own targets and ignores. A checkpoint has one config, so the groups of all
modifiers are merged; patterns that would then match other modules are written out as names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
)
from torch.nn import Embedding, Linear, Module

from steelyard.checkpoint.patterns import slow_pattern
from steelyard.errors import PlanError
from steelyard.model.matching import by_all_names, matching_ignore, matching_targets
from steelyard.modifiers import Modifier
from steelyard.words import count

__all__ = [
    "Claim",
    "Match",
    "claims_of",
    "cross_claims",
    "merged_config",
    "refuse_slow_patterns",
]


@dataclass(frozen=True)
class Claim:
    """The targets of one modifier of a recipe.

    modifier: its index in the recipe
    label:    its class name, with a number if the recipe has several of that class
    groups:   the config's groups, by names that are unique within the recipe
    """

    modifier: int
    label: str
    config: QuantizationConfig
    groups: Mapping[str, QuantizationScheme]

    def match(self, model: Any, name: str, module: Module) -> Match:
        targets = {t: group for group, scheme in self.groups.items() for t in scheme.targets}
        hits = matching_targets(model, name, module, list(targets)) if targets else []
        ignored = matching_ignore(model, name, module, self.config.ignore, hits)
        return Match(self, hits, ignored, targets[hits[0]] if hits else None)


@dataclass(frozen=True)
class Match:
    """The match of a claim and a module.

    hits:    the targets that match the module, the deciding one first
    ignored: the ignore that matches it, if any
    group:   the group of the first target
    """

    claim: Claim
    hits: list[str]
    ignored: str | None
    group: str | None

    @property
    def taken(self) -> bool:
        return self.group is not None and self.ignored is None


def claims_of(config: QuantizationConfig | None, modifiers: Sequence[Modifier]) -> list[Claim]:
    """Return a claim for each modifier that quantizes; without modifiers, one for `config`."""
    made = [(i, m, m.quantization_config()) for i, m in enumerate(modifiers)]
    quantizing = [(i, type(m).__name__, given) for i, m, given in made if given is not None]
    if not quantizing and config is not None:
        quantizing = [(0, "the recipe", config)]
    kinds = [kind for _, kind, _ in quantizing]
    claims: list[Claim] = []
    taken: set[str] = set()
    for place, (index, kind, each) in enumerate(quantizing):
        number = f" {kinds[:place].count(kind) + 1}" if kinds.count(kind) > 1 else ""
        groups = {_unused(name, taken): s for name, s in each.config_groups.items()}
        claims.append(Claim(index, f"{kind}{number}", each, groups))
    return claims


def _unused(name: str, taken: set[str]) -> str:
    """Return a group name that is not in `taken`."""
    free, number = name, 0
    while free in taken:
        free, number = f"group_{number}", number + 1
    taken.add(free)
    return free


def refuse_slow_patterns(
    model: Any, claims: Sequence[Claim], modifiers: Sequence[Modifier]
) -> None:
    """Raise before anything is matched: an expression that backtracks for years cannot be ended."""
    patterns = [t for c in claims for s in c.groups.values() for t in s.targets]
    patterns += [pattern for claim in claims for pattern in claim.config.ignore]
    patterns += [pattern for modifier in modifiers for pattern in modifier.patterns()]
    problem = slow_pattern(patterns, list(by_all_names(model)))
    if problem is not None:
        raise PlanError(problem)


def cross_claims(
    claims: Sequence[Claim], shared: Mapping[tuple[str, str], list[str]]
) -> Iterator[str]:
    """Yield an error for each pair of modifiers that quantize the same modules, or the cache.

    shared: (label, label) -> modules
    """
    for (one, other), names in shared.items():
        which = names[0] if len(names) == 1 else f"{count(len(names), 'module')} such as {names[0]}"
        yield (
            f"{one} and {other} both quantize {which}: make their targets differ, or add it to the "
            "ignore of one"
        )
    caching = [claim.label for claim in claims if claim.config.kv_cache_scheme is not None]
    if len(caching) > 1:
        yield f"{' and '.join(caching)} both have a kv_cache_scheme: keep it in one of them"


def merged_config(
    model: Any, claims: Sequence[Claim], groups: Mapping[str, str]
) -> QuantizationConfig:
    """Return the merged config of all claims.

    groups: module -> the group that quantizes it
    """
    if len(claims) == 1:
        return claims[0].config
    schemes = {name: s for claim in claims for name, s in claim.groups.items()}
    ignore = list(dict.fromkeys(i for claim in claims for i in claim.config.ignore))
    if not _holds(model, schemes, ignore, groups):
        members: dict[str, list[str]] = {}
        for module, group in groups.items():
            members.setdefault(group, []).append(module)
        schemes = {
            name: scheme.model_copy(update={"targets": members[name]})
            for name, scheme in schemes.items()
            if name in members
        }
        ignore = [pattern for pattern in ignore if not _hits_any(model, pattern, groups)]
    caches = [c.config.kv_cache_scheme for c in claims]
    return QuantizationConfig(
        config_groups=schemes,
        kv_cache_scheme=next((cache for cache in caches if cache is not None), None),
        quantization_status=QuantizationStatus.INITIALIZED,
        ignore=ignore,
    )


def _holds(
    model: Any,
    schemes: Mapping[str, QuantizationScheme],
    ignore: Sequence[str],
    groups: Mapping[str, str],
) -> bool:
    """Whether the merged patterns of all modifiers still give each module its own group."""
    targets = {t: group for group, scheme in schemes.items() for t in scheme.targets}
    if len(targets) != sum(len(set(scheme.targets)) for scheme in schemes.values()):
        return False
    for name, module in model.named_modules():
        if not isinstance(module, (Linear, Embedding)):
            continue
        hits = matching_targets(model, name, module, list(targets))
        ignored = matching_ignore(model, name, module, ignore, hits) is not None
        found = {targets[hit] for hit in hits} if not ignored else set()
        if found != ({groups[name]} if name in groups else set()):
            return False
    return True


def _hits_any(model: Any, pattern: str, names: Iterable[str]) -> bool:
    modules = dict(model.named_modules())
    return any(matching_ignore(model, n, modules[n], [pattern], []) is not None for n in names)
