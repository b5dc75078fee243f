"""AWQ: search factors that make the readers of a pair lose least when they are stored.

A factor grows with the mean of |x| of its channel, to a power that the search finds, so that the
weights of large inputs are rounded finely (Lin et al. 2023). Each candidate is judged as it would
be stored: with the scheme of the following modifier, its observers, and rounded inputs if it has
any. Errors of the readers on one half of the sampled tokens choose a candidate. It is taken if the
other half agrees, and if it lowers the error of the block's output on held-out batches.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial

import torch

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.balancing import Balancing, BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.factor_choice import best_of
from steelyard.algorithms.pair_error import (
    PairError,
    all_adapted,
    is_measurable,
    pair_error,
    plain_outputs,
    source_error,
)
from steelyard.algorithms.pairs import Pair, folded
from steelyard.modifiers.awq import AWQModifier
from steelyard.observers.steps import args_for
from steelyard.plan.plan import Plan

__all__ = ["AWQ", "awq_factors", "best_factor"]

_SMALLEST = 1e-4
_BATCHES = 8  # that the block's output is measured on


@Algorithm.register("awq")
class AWQ(Balancing):
    """Folds the factors that a search finds into each pair that gains from them."""

    modifier: AWQModifier

    def idle(self, plan: Plan, adapted: Collection[int]) -> str | None:
        return all_adapted(plan, adapted)

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        if not is_measurable(block, pair, state):
            return None
        found = best_factor(block, pair, state, self.modifier.n_grid, self.modifier.duo_scaling)
        if found is None:
            return None
        factor, ratios = found
        wins = max(ratios) <= 1 and best_of(block, pair, state, [factor], _BATCHES) is not None
        return factor if wins else None


def best_factor(
    block: Block, pair: Pair, state: BalancingState, n_grid: int, duo_scaling: bool | str
) -> tuple[torch.Tensor, list[float]] | None:
    """Return the factor with the least error on the first half of the sample.

    The error of each reader counts relative to its error without a factor: that of v is not drowned
    by that of q and k. Also returns these ratios on the other half. None if no token reached the
    pair, or no factor is better than none. The ranks divide the candidates among themselves.
    """
    factors = list(awq_factors(block, pair, state, n_grid, duo_scaling))
    if not factors:
        return None
    factors.insert(0, torch.ones_like(factors[0]))
    errors = _errors(block, pair, state, factors)
    plain, source = errors[0]
    allowed = [i for i, (_, own) in enumerate(errors) if own <= source]
    best = min(allowed, key=lambda i: sum(_ratios(errors[i][0].fit, plain.fit)))
    return (factors[best], _ratios(errors[best][0].held_out, plain.held_out)) if best else None


def _ratios(errors: Mapping[str, float], plain: Mapping[str, float]) -> list[float]:
    return [errors[kind] / plain[kind] if plain[kind] else 1.0 for kind in plain]


def _errors(
    block: Block, pair: Pair, state: BalancingState, factors: Sequence[torch.Tensor]
) -> list[tuple[PairError, float]]:
    plain = plain_outputs(block, pair, state)

    def error(factor: torch.Tensor) -> tuple[dict[str, float], dict[str, float], float]:
        candidate = folded(block, pair, factor)
        found = pair_error(block, pair, state, candidate, plain)
        return found.fit, found.held_out, source_error(block, pair, candidate)

    ranks = block.ranks
    mine = range(ranks.rank, len(factors), ranks.count)
    found = block.pool.do((i, partial(error, factors[i])) for i in mine)
    every = ranks.gather(dict(zip(mine, found, strict=True)))
    joined = {i: each for part in every for i, each in part.items()}
    return [(PairError(joined[i][0], joined[i][1]), joined[i][2]) for i in range(len(factors))]


def awq_factors(
    block: Block, pair: Pair, state: BalancingState, n_grid: int, duo_scaling: bool | str
) -> Iterator[torch.Tensor]:
    """Yield the candidates, each (size,): mean|x|^r, with duo scaling over mean|w|^(1 - r)."""
    inputs = _mean_inputs(block, pair, state)
    if inputs is None:
        return
    weights = _mean_weights(block, pair)
    if duo_scaling == "both":
        ways = [(i / (n_grid // 2), duo) for duo in (False, True) for i in range(n_grid // 2)]
    else:
        ways = [(i / n_grid, bool(duo_scaling)) for i in range(n_grid)]
    for ratio, duo in ways:
        factor = inputs.pow(ratio)
        if duo:
            factor = factor / (weights.pow(1 - ratio) + _SMALLEST)
        factor = factor.clamp(min=_SMALLEST)
        factor = factor / (factor.max() * factor.min()).sqrt()
        if bool(factor.isfinite().all()):
            yield factor


def _mean_inputs(block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
    """Return mean|x| of the first half of the sample, (size,)."""
    halves = [statistics.halves(block.device)[0] for statistics, _ in state.statistics(pair)]
    if not halves:
        return None
    return pair.mean(torch.cat(halves).abs().mean(0))


def _mean_weights(block: Block, pair: Pair) -> torch.Tensor:
    """Return the mean of |w| over the largest |w| that shares its scale, (size,)."""
    total, rows = torch.zeros(pair.size * pair.repeats, device=block.device), 0
    for name in pair.readers:
        weight = block.tensor(f"{name}.weight").float().abs()
        args = args_for(block.within[name], "weight")
        size = (args.group_size if args is not None else None) or weight.shape[1]
        if size <= 0 or weight.shape[1] % size:
            size = weight.shape[1]
        grouped = weight.reshape(len(weight), -1, size)
        total += (grouped / grouped.amax(-1, keepdim=True).clamp(min=1e-12)).sum(0).reshape(-1)
        rows += len(weight)
    return pair.mean(total / rows)
