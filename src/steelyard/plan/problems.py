"""Finds errors and warnings of a recipe for a model.

Each check yields one sentence per problem, with the module and the remedy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from torch.nn import Module

from steelyard.errors import StrategyError
from steelyard.formats import stored_as
from steelyard.formats.tensor_names import SCALE
from steelyard.fusion import fused_groups, shared_parameters
from steelyard.model.attention import attention_group, cached_attention
from steelyard.model.matching import by_all_names
from steelyard.modifiers import Modifier
from steelyard.observers.helpers import check_strategy
from steelyard.observers.type_checks import check_type
from steelyard.plan.divisibility import (
    indivisible_blocks,
    indivisible_groups,
    indivisible_in_parallel,
)
from steelyard.plan.embedding_checks import embedding_errors, embedding_warnings
from steelyard.plan.expert_checks import expert_problems
from steelyard.plan.rotation_checks import rotation_errors, rotation_warnings
from steelyard.plan.state_space_checks import unserved_mixers
from steelyard.plan.tied_weights import tied_errors
from steelyard.plan.unmatched import (
    misspelled_ignores,
    nothing_quantized,
    unmatched_targets,
    unused_ignores,
)
from steelyard.words import count

if TYPE_CHECKING:
    from steelyard.plan.claims import Claim
    from steelyard.plan.plan import Plan, Planned

__all__ = ["errors_of", "warnings_of"]


def errors_of(
    plan: Plan, model: Any, claims: Sequence[Claim], modifiers: Sequence[Modifier]
) -> Iterator[str]:
    """Yield the errors of a plan."""
    modules = dict(model.named_modules())
    named = by_all_names(model)
    quantizing = {claim.modifier for claim in claims}
    targets = [t for c in claims for scheme in c.groups.values() for t in scheme.targets]
    for index, modifier in enumerate(modifiers):
        if index not in quantizing:
            kind = f" of {type(modifier).__name__}"
            yield from unmatched_targets(named, modifier.targets, kind)
        yield from modifier.checks(plan, model)
    yield from unmatched_targets(named, targets)
    chosen = {each.name for each in plan.quantized}
    yield from misspelled_ignores(named, _ignores(claims, modifiers), chosen)
    yield from expert_problems(model, modules, plan)
    yield from _unstorable(plan)
    yield from _inputs_alone(plan)
    yield from _unsupported_attention(plan, model, modules)
    if modifiers and not claims:
        yield "no modifier of the recipe quantizes: add one that does, such as QuantizationModifier"
    elif claims and not plan.quantized and not plan.attention:
        yield nothing_quantized(model)
    yield from embedding_errors(plan, model)
    yield from tied_errors(model, plan)
    yield from _half_fused(modules, plan)
    yield from rotation_errors(plan, model)
    bypass = any(modifier.allows_padding for modifier in modifiers)
    yield from indivisible_groups(plan, bypass)
    if not bypass:
        yield from indivisible_blocks(plan)
    for planned in plan.quantized:
        if 0 in planned.shape:
            yield f"{planned.name} has no weights, its shape is {planned.shape}; ignore it"
            continue
        yield from _unreadable(planned)


def _ignores(claims: Sequence[Claim], modifiers: Sequence[Modifier]) -> list[str]:
    """Return what the modifiers ignore, of the quantizing ones as it is written."""
    quantizing = {claim.modifier for claim in claims}
    written = [pattern for claim in claims for pattern in claim.config.ignore]
    rest = (m.ignore for index, m in enumerate(modifiers) if index not in quantizing)
    return [*written, *(pattern for patterns in rest for pattern in patterns)]


def warnings_of(
    plan: Plan, model: Any, claims: Sequence[Claim], modifiers: Sequence[Modifier]
) -> Iterator[str]:
    """Yield the warnings of a plan: it runs, but perhaps not as intended."""
    chosen = {each.name for each in plan.quantized}
    yield from unused_ignores(by_all_names(model), _ignores(claims, modifiers), chosen)
    for modifier in modifiers:
        yield from modifier.doubts(plan, model)
    stacked = [left for left in plan.left if len(left.shape) > 2]
    if stacked:
        share = sum(left.nbytes for left in stacked) / max(plan.source_bytes, 1)
        yield (
            f"{count(len(stacked), 'stacked weight')} such as {stacked[0].name} "
            f"{stacked[0].shape}, {share:.0%} of the model, not quantized"
        )
    yield from rotation_warnings(plan)
    yield from _inferred_from_names(plan, model)
    yield from embedding_warnings(plan, model)
    yield from indivisible_in_parallel(plan)
    yield from unserved_mixers(dict(model.named_modules()), plan)


def _inferred_from_names(plan: Plan, model: Any) -> Iterator[str]:
    """Warn of modules of files that no class of transformers confirms."""
    inferred = getattr(model, "inferred", lambda name: False)
    names = [planned.name for planned in plan.quantized if inferred(planned.name)]
    if names:
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        because = model.unknown or f"{type(model.known.model).__name__} does not have them"
        yield (
            f"{shown} are treated as Linear by their names alone: {because}. Ignore those that "
            "are not"
        )


# -- types and strategies ---------------------------------------------------------------------


def _unstorable(plan: Plan) -> Iterator[str]:
    """Yield the errors that observers would raise for each scheme."""
    used = {p.group: p.scheme for p in plan.quantized}
    for group, scheme in used.items():
        for base_name, args in _args(scheme):
            if problem := _refusal(base_name, args):
                yield f"{base_name} of {group}: {problem}"


def _inputs_alone(plan: Plan) -> Iterator[str]:
    """Refuse static input scales without quantized weights, which no format stores."""
    for name, scheme in plan.config.config_groups.items():
        inputs = scheme.input_activations
        used = any(planned.group == name for planned in plan.quantized)
        if used and scheme.weights is None and inputs is not None and not inputs.dynamic:
            yield (
                f"the config group {name!r} has static input scales but does not quantize weights, "
                "which no format stores; add weights to it, or remove the group"
            )


def _refusal(base_name: str, args: QuantizationArgs) -> str | None:
    if args.dynamic is True:  # no observer; compressed-tensors has checked it
        return None
    try:
        check_strategy(base_name, args)
        check_type(args)
    except StrategyError as error:
        return str(error)
    return None


def _args(scheme: QuantizationScheme) -> list[tuple[str, QuantizationArgs]]:
    pairs = [
        ("weight", scheme.weights),
        ("input", scheme.input_activations),
        ("output", scheme.output_activations),
    ]
    return [(label, args) for label, args in pairs if args is not None]


# -- attention --------------------------------------------------------------------------------


def _unsupported_attention(plan: Plan, model: Any, modules: dict[str, Module]) -> Iterator[str]:
    cache = plan.config.kv_cache_scheme
    if cache is not None:
        if problem := _refusal("k", cache):
            yield f"kv_cache_scheme: {problem}"
        if not plan.attention:
            yield (
                f"kv_cache_scheme: {type(model).__name__} has no attention module with k_proj and "
                "v_proj whose cache can be quantized; remove it"
            )
    if plan.attention and (problem := _unknown_heads(model)):
        yield (
            f"the states of {plan.attention[0]} cannot be quantized: {problem}; remove "
            f"{'kv_cache_scheme' if cache is not None else 'attention from the targets'}"
        )
    by_group: dict[str, list[str]] = {}
    others: list[str] = []
    for name, module in cached_attention(model).items():
        group = attention_group(model, plan.config, name, module)
        if group is not None:
            by_group.setdefault(group, []).append(name)
        else:
            others.append(name)
    if by_group and others:
        matched = [name for names in by_group.values() for name in names]
        yield (
            f"{next(iter(by_group))} targets {len(matched)} of {len(matched) + len(others)} "
            f"attention modules, such as {matched[0]}, but not {others[0]}; compressed-tensors "
            "runs quantized states in all layers or in none: target them all"
        )
    for group, names in by_group.items():
        if problem := _no_scheme_for_attention(plan.config.config_groups[group]):
            states = count(len(names), "attention module")
            yield f"{group} targets {states} such as {names[0]}, {problem}"


def _unknown_heads(model: Any) -> str | None:
    """Return why compressed-tensors cannot find the shape of the states."""
    from compressed_tensors.utils import get_head_dim, get_num_attn_heads, get_num_kv_heads

    config = model.config.get_text_config()
    try:
        get_num_attn_heads(config), get_num_kv_heads(config), get_head_dim(config)
    except ValueError as error:
        return str(error).partition(". ")[0]
    return None


def _no_scheme_for_attention(scheme: QuantizationScheme) -> str | None:
    if scheme.weights is not None:
        return (
            "which have no weights of their own: target their projections "
            "(re:.*self_attn\\.[qkvo]_proj$), or give only input_activations"
        )
    if scheme.output_activations is not None or scheme.input_activations is None:
        return "whose states are quantized by input_activations: give those, and nothing else"
    return _refusal("q", scheme.input_activations)


# -- layers that belong together --------------------------------------------------------------


def _half_fused(modules: dict[str, Module], plan: Plan) -> Iterator[str]:
    quantized = {p.name: p for p in plan.quantized}
    for group in fused_groups(modules):
        taken = [name for name in group if name in quantized]
        missing = [name for name in group if name not in quantized]
        if taken and missing:
            yield (
                f"{', '.join(taken)} would be quantized but {', '.join(missing)} would not, "
                "and the server fuses them: target them all, or ignore them all"
            )
        elif len({quantized[name].group for name in taken}) > 1:
            yield (
                f"{', '.join(taken)} belong to different config groups, but the server fuses "
                "them: put them into one group"
            )
        elif taken and SCALE in shared_parameters(quantized[taken[0]].scheme):
            types = {quantized[name].dtype for name in taken}
            if len(types) > 1:
                yield (
                    f"{', '.join(taken)} share one scale when served, but have the types "
                    f"{', '.join(sorted(map(str, types)))}: save the model in one type first"
                )


def _unreadable(planned: Planned) -> Iterator[str]:
    """Refuse weights that the format stores, but that compressed-tensors cannot read back."""
    args = planned.scheme.weights
    if args is not None and (problem := stored_as(planned.scheme).problem(args, planned.shape)):
        yield f"{planned.name}: {problem}"
