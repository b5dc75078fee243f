"""The error of a block's output with a pair as it would be stored, on held-out batches.

Source and readers are rounded, and the inputs of the readers if the scheme rounds them; everything
else in the block is not. Static scales come from even batches, the errors from odd ones.

The squared error of a token is divided by the root of its norm, as `token_mse` does: a few tokens
with huge values do not decide alone, but count, since all others may attend to them.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms.as_stored import (
    Rounding,
    needs_importance,
    rounded_weights,
    shared_rounding,
)
from steelyard.algorithms.balancing import BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.guard import is_gain
from steelyard.algorithms.pair_check import replaced_tensors
from steelyard.algorithms.pairs import Folded, Pair, folded
from steelyard.observers.steps import args_for

__all__ = ["best_of", "block_errors"]

_LEAST_GAIN = 0.01  # of the error; a smaller one changes nothing that can be measured


def best_of(
    block: Block,
    pair: Pair,
    state: BalancingState,
    factors: Sequence[torch.Tensor],
    batches: int,
) -> torch.Tensor | None:
    """Return the factor with the least error of the block's output; None if none wins.

    A factor wins if the batches' errors fall by more than noise explains, and by at least 1 %. Adds
    the error before and after to `state.gains`.

    batches: number of batches to measure on
    """
    plain, *errors = block_errors(
        block, pair, state, [torch.ones_like(factors[0]), *factors], batches
    )
    best = min(range(len(errors)), key=lambda i: math.fsum(errors[i]))
    before, after = math.fsum(plain), math.fsum(errors[best])
    shares = [error / own if own else 1.0 for own, error in zip(plain, errors[best], strict=True)]
    if not after < (1 - _LEAST_GAIN) * before or not is_gain([1.0] * len(shares), shares):
        return None
    state.gains.append((before, after))
    return factors[best]


def block_errors(
    block: Block,
    pair: Pair,
    state: BalancingState,
    factors: Sequence[torch.Tensor],
    batches: int,
) -> list[list[float]]:
    """Return the error with each factor, by batch; the same on every rank."""
    even, odd = _measured(block, state, batches)
    inputs = _inputs(block, pair, state, even)
    outputs = {number: block.forward(index) for index, number in odd}
    dtype = next((each.dtype for each in outputs.values()), torch.float32)
    found: dict[int, list[float]] = {number: [] for _, number in odd}
    for factor in factors:
        with _as_stored(block, state, pair, folded(block, pair, factor), inputs, dtype):
            for index, number in odd:
                expected = outputs[number].double()
                off = (block.forward(index).double() - expected).square().sum(-1)
                size = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
                found[number].append(float((off / size.sqrt()).sum()))
    every = {n: errors for part in block.ranks.gather(found) for n, errors in part.items()}
    return [[every[number][i] for number in sorted(every)] for i in range(len(factors))]


def _measured(
    block: Block, state: BalancingState, limit: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Return this rank's even and odd batches, at most `limit` of all ranks' each.

    Each has its index on this rank and its number in the run. A single batch is both.
    """
    every = sorted(n for part in block.ranks.gather(list(state.batches)) for n in part)
    halves = []
    for rest in (0, 1):
        chosen = set([n for n in every if n % 2 == rest][:limit] or every[:limit])
        halves.append([(i, n) for i, n in enumerate(state.batches) if n in chosen])
    return halves[0], halves[1]


def _inputs(
    block: Block, pair: Pair, state: BalancingState, batches: Sequence[tuple[int, int]]
) -> dict[str, torch.Tensor]:
    """Return the inputs that a static scale needs, (tokens, channels), by the first reader."""
    first = [names[0] for _, names in state.statistics(pair)]
    static = [name for name in first if _is_static(block.within[name])]
    if not static:
        return {}
    found = {number: _seen(block, static, index) for index, number in batches}
    every = {n: seen for part in block.ranks.gather(found) for n, seen in part.items()}
    inputs = {}
    for name in static:
        rows = [every[n][name] for n in sorted(every) if name in every[n]]
        if rows:
            inputs[name] = torch.cat(rows).to(block.device)
    return inputs


def _seen(block: Block, names: Sequence[str], batch: int) -> dict[str, torch.Tensor]:
    """Run one batch through the block; return copies of the inputs of modules."""
    seen: dict[str, torch.Tensor] = {}

    def keep(name: str, _: Module, args: tuple[Any, ...]) -> None:
        seen[name] = args[0].reshape(-1, args[0].shape[-1]).to("cpu", copy=True)

    with contextlib.ExitStack() as hooks:
        for name in names:
            hook = block.within[name].register_forward_pre_hook(partial(keep, name))
            hooks.callback(hook.remove)
        block.forward(batch)
    return seen


def _is_static(module: Module) -> bool:
    args = args_for(module, "input")
    return args is not None and args.dynamic is not True


@contextlib.contextmanager
def _as_stored(
    block: Block,
    state: BalancingState,
    pair: Pair,
    candidate: Folded,
    inputs: Mapping[str, torch.Tensor],
    dtype: torch.dtype,
) -> Iterator[None]:
    """Let a block compute with a pair as it would be stored.

    inputs: before they are divided, for static scales
    dtype:  of the computation
    """
    squares: dict[str, tuple[torch.Tensor, int]] = {}
    roundings: dict[str, Rounding] = {}
    for statistics, names in state.statistics(pair):
        rows = statistics.halves(block.device)[0] / candidate.columns
        squares |= dict.fromkeys(names, (rows.square().sum(0), len(rows)))
        given = inputs[names[0]] / candidate.columns if names[0] in inputs else rows
        roundings |= shared_rounding(block.within, names, given, block.unserved)
    weights = {
        name: value
        for key, value in candidate.tensors.items()
        if key.endswith(".weight")
        # the inputs of the Linear that feeds a pair are not known here
        and ((name := key.removesuffix(".weight")) in squares or not _unknown(block, name))
    }
    rounded = rounded_weights(block.within, weights, squares)
    changed = {name: value.to(dtype) for name, value in candidate.tensors.items()}
    changed |= {f"{name}.weight": value.to(dtype) for name, value in rounded.items()}
    with replaced_tensors(block, changed), contextlib.ExitStack() as hooks:
        for name, rounding in roundings.items():
            hook = partial(_rounded_call, rounding)
            hooks.callback(block.within[name].register_forward_pre_hook(hook).remove)
        yield


def _unknown(block: Block, name: str) -> bool:
    return name in block.within and needs_importance(block.within[name])


def _rounded_call(rounding: Rounding, _module: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounding(args[0]), *args[1:])
