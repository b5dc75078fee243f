"""A plan as text, in the future tense: a table of what is quantized how, and what it will take."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from compressed_tensors.quantization import QuantizationArgs

from steelyard.foreign import printable
from steelyard.formats import format_of
from steelyard.formats.descriptions import describe_args
from steelyard.names import WEIGHT_OBSERVER
from steelyard.plan.tied_weights import untying_notes
from steelyard.words import count, duration, size, table_lines

if TYPE_CHECKING:
    from steelyard.plan.plan import Plan, Planned

__all__ = ["plan_text"]

_TITLES = ("group", "modules", "weights", "bits", "observer", "algorithm", "inputs", "stored as")
_NUMBERS = ("modules", "bits")


def plan_text(plan: Plan) -> str:
    """Return what a run will do, what it will not and why, and what it will take."""
    lines = [f"will quantize {count(len(plan.quantized), 'module')}"]
    groups: dict[tuple[str, int], list[Planned]] = {}
    for planned in plan.quantized:
        groups.setdefault((planned.group, planned.modifier), []).append(planned)
    if groups:
        rows = [_row(plan, members) for members in groups.values()]
        left = [i for i, title in enumerate(_TITLES) if title not in _NUMBERS]
        lines += [f"  {line}" for line in table_lines(_TITLES, rows, left)]
    lines += plan.chosen
    if plan.attention:
        lines.append(
            f"will quantize the states of {count(len(plan.attention), 'attention module')}"
        )
    lines += untying_notes(plan)
    for reason in dict.fromkeys(each.reason for each in plan.left):
        names = [each.name for each in plan.left if each.reason == reason]
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        lines.append(f"will not quantize: {shown} ({reason})")
    if plan.samples and plan.forward.reason:
        lines.append(plan.forward.reason)
    lines += plan.placing
    facts = list(_facts(plan))
    lines += table_lines(facts[0], facts[1:], left=(0, 1)) if facts else []
    lines += [f"warning: {warning}" for warning in plan.warnings]
    lines += [f"error: {error}" for error in plan.errors]
    return "\n".join(printable(line) for line in lines)


def _row(plan: Plan, members: list[Planned]) -> list[str]:
    scheme = members[0].scheme
    weights = scheme.weights
    known = members[0].modifier < len(plan.algorithms)
    elements = sum(math.prod(planned.shape) for planned in members)
    stored = 0 if plan.errors else sum(planned.stored_bytes for planned in members)
    return [
        members[0].group,
        str(len(members)),
        "-" if weights is None else describe_args(weights),
        f"{8 * stored / elements:.2f}" if stored else "-",  # unknown where groups do not fit
        "-" if weights is None else weights.observer or WEIGHT_OBSERVER,
        plan.algorithms[members[0].modifier] if known else "-",
        _activations(scheme.input_activations),
        format_of(scheme),
    ]


def _activations(args: QuantizationArgs | None) -> str:
    if args is None:
        return "not quantized"
    if args.dynamic is True:
        return f"{describe_args(args)}, dynamic"
    return f"{describe_args(args)}, {args.observer or 'static'}"


def _facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield what the run will read, where it will compute, and the estimated cost."""
    others = [name for name in plan.algorithms if name not in _used(plan)]
    if others:
        yield "other steps", ", ".join(others)
    if plan.samples:
        tokens = f"up to {plan.samples:,} samples of up to {plan.tokens // plan.samples:,} tokens"
        yield "data", tokens
    if plan.route:
        yield "runs", plan.route
    yield "device", plan.device
    if not plan.errors:  # else the size is unknown
        yield "size", f"{size(plan.source_bytes)} -> {size(plan.output_bytes)}"
        yield "memory", f"about {size(plan.memory)}"
        yield "time", f"about {duration(plan.seconds)}"


def _used(plan: Plan) -> set[str]:
    """Return the algorithms that the table has."""
    indices = {planned.modifier for planned in plan.quantized}
    return {plan.algorithms[i] for i in indices if i < len(plan.algorithms)}
