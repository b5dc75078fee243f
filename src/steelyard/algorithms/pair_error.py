"""The error of a pair's readers as they would be stored, on a sample of their inputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch

from steelyard.algorithms.as_stored import rounded_weights, shared_rounding
from steelyard.algorithms.balancing import BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.pairs import Folded, Pair
from steelyard.observers.steps import args_for
from steelyard.plan.plan import Plan

__all__ = [
    "PairError",
    "all_adapted",
    "is_measurable",
    "is_quantized",
    "pair_error",
    "plain_outputs",
    "source_error",
]

_ROWWISE = ("channel", "group")  # strategies whose codes stay if a row is scaled


@dataclass(frozen=True)
class PairError:
    """Squared errors of the readers' outputs, by the last part of their names.

    Those of all experts are added up, since many get few tokens.

    fit:      on the half of the sample that importance comes from
    held_out: on the other half
    """

    fit: dict[str, float]
    held_out: dict[str, float]


def is_quantized(block: Block, name: str) -> bool:
    module = block.within[name]
    return any(args_for(module, base) is not None for base in ("weight", "input"))


def is_measurable(block: Block, pair: Pair, state: BalancingState) -> bool:
    """Whether rounding to nearest tells what a pair gains; if not, its readers are noted.

    GPTQ makes up for the errors of columns with large inputs itself: what rounding to nearest gains
    by a factor, it does not.
    """
    names = [name for name in pair.readers if is_quantized(block, name)]
    adapted = [name in block.adapted for name in names]
    inputs = [args_for(block.within[name], "input") is not None for name in names]
    if names and all(adapted) and not any(inputs):
        reason = "the modifier that rounds its weight makes up for large inputs itself"
        state.found.unbalanced |= dict.fromkeys(names, reason)
        return False
    return bool(names)


def all_adapted(plan: Plan, adapted: Collection[int]) -> str | None:
    """Return why no pair of a planned run is measurable; None if one may be.

    adapted: indices of the modifiers that do not round weights to nearest
    """
    left = [
        planned
        for planned in plan.quantized
        if planned.modifier not in adapted or planned.scheme.input_activations is not None
    ]
    reason = "the modifier that rounds the weights makes up for large inputs itself"
    return None if left or not plan.quantized else reason


@torch.no_grad()
def plain_outputs(
    block: Block, pair: Pair, state: BalancingState
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return the outputs of the quantized readers as they are, for both halves of the sample."""
    found = {}
    for statistics, names in state.statistics(pair):
        fit, held_out = statistics.halves(block.device)
        for name in (name for name in names if is_quantized(block, name)):
            weight = block.tensor(f"{name}.weight").float()
            found[name] = (fit @ weight.T, held_out @ weight.T)
    return found


@torch.no_grad()
def pair_error(
    block: Block,
    pair: Pair,
    state: BalancingState,
    folded: Folded,
    plain: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
) -> PairError:
    """Return the error of all quantized readers, over all inputs of the pair.

    plain: their `plain_outputs`
    """
    errors: tuple[dict[str, float], dict[str, float]] = ({}, {})
    for statistics, names in state.statistics(pair):
        names = [name for name in names if is_quantized(block, name)]
        divided = [rows / folded.columns for rows in statistics.halves(block.device)]
        squares = divided[0].square().sum(0), len(divided[0])
        weights = {name: folded.tensors[f"{name}.weight"] for name in names}
        rounded = rounded_weights(block.within, weights, dict.fromkeys(names, squares))
        roundings = shared_rounding(block.within, names, divided[0], block.unserved)
        for name in names:
            rounding = roundings.get(name)
            for i, (own, expected) in enumerate(zip(divided, plain[name], strict=True)):
                x = own if rounding is None else rounding(own)
                off = x @ rounded[name].T - expected
                kind, error = name.rpartition(".")[2], off.square().sum(dtype=torch.float64)
                errors[i][kind] = errors[i].get(kind, 0.0) + float(error)
    return PairError(*errors)


@torch.no_grad()
def source_error(block: Block, pair: Pair, folded: Folded) -> float:
    """Return the error that a pair's source has besides its readers', in the units of its output.

    0 for norms, and where each row has its own scale, which a factor on the row leaves the same.
    """
    args = args_for(block.within[pair.source], "weight")
    if args is None or args.strategy in _ROWWISE:
        return 0.0
    name = f"{pair.source}.weight"
    weight = folded.tensors[name]
    rounded = rounded_weights(block.within, {pair.source: weight}, {})[pair.source]
    scale = torch.ones(len(weight), device=weight.device)
    before = block.tensor(name).float().abs().amax(1)
    after = weight.float().abs().amax(1)
    scale = torch.where(after > 0, before / after, scale)
    off = (rounded - weight.float()) * scale[:, None]
    return float(off.square().sum(dtype=torch.float64))
