"""The error of a block's output with a pair as it would be stored, on held-out batches.

Source and readers are rounded, and the inputs of the readers if the scheme rounds them; everything
else in the block is not. Static scales come from even batches, the errors from odd ones.

The squared error of a token is divided by the root of its norm, as `token_mse` does: a few tokens
with huge values do not decide alone, but count, since all others may attend to them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms.as_stored import (
    Rounding,
    needs_importance,
    rounded_weights,
    shared_rounding,
    token_rounding,
)
from steelyard.algorithms.balancing import BalancingState
from steelyard.algorithms.block import Block
from steelyard.algorithms.pair_check import replaced_tensors
from steelyard.algorithms.pairs import Pair, folded
from steelyard.observers.steps import args_for

__all__ = ["BlockError", "Candidate"]


@dataclass(frozen=True)
class Candidate:
    """A factor of a pair, and whether its readers get a scale for each token."""

    factor: torch.Tensor
    dynamic: bool = False


class BlockError:
    """Measures the output of a block with candidates for one pair.

    batches: number of batches to measure on, and to take static scales from
    """

    def __init__(self, block: Block, pair: Pair, state: BalancingState, batches: int) -> None:
        self.block, self.pair, self.state = block, pair, state
        every = sorted(n for part in block.ranks.gather(list(state.batches)) for n in part)
        even, self.numbers = (
            [n for n in every if n % 2 == rest][:batches] or every[:batches] for rest in (0, 1)
        )
        self.inputs = self._inputs(even)

    @property
    def static(self) -> list[str]:
        """Names of the readers with a static scale for all of their inputs."""
        names = [name for name in self.pair.readers if name in self.block.within]
        return [name for name in names if _is_static(self.block.within[name], local=False)]

    @torch.no_grad()
    def of(
        self, candidates: Sequence[Candidate], start: int = 0, stop: int | None = None
    ) -> list[list[float]]:
        """Return the error with each candidate, by batch; the same on every rank.

        start, stop: of the batches to measure on
        """
        block, outputs = self.block, self.state.outputs
        mine = self._mine(self.numbers[start:stop])
        for index, number in mine:
            if number not in outputs:  # folding leaves them as they are
                outputs[number] = block.forward(index)
        dtype = next((outputs[number].dtype for _, number in mine), torch.float32)
        found: dict[int, list[float]] = {number: [] for _, number in mine}
        for candidate in candidates:
            with self._as_stored(candidate, dtype):
                for index, number in mine:
                    expected = outputs[number].double()
                    off = (block.forward(index).double() - expected).square().sum(-1)
                    size = expected.norm(dim=-1).clamp(min=torch.finfo(torch.float32).tiny)
                    found[number].append(float((off / size.sqrt()).sum()))
        every = {n: errors for part in block.ranks.gather(found) for n, errors in part.items()}
        return [[every[number][i] for number in sorted(every)] for i in range(len(candidates))]

    def _mine(self, numbers: Sequence[int]) -> list[tuple[int, int]]:
        """Return those of this rank's batches, each with its index here and its number."""
        chosen = set(numbers)
        return [(i, n) for i, n in enumerate(self.state.batches) if n in chosen]

    def _inputs(self, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
        """Return the inputs that a static scale needs, (tokens, channels), by the first reader."""
        block = self.block
        first = [names[0] for _, names in self.state.statistics(self.pair)]
        static = [name for name in first if _is_static(block.within[name], local=True)]
        if not static:
            return {}
        found = {number: _seen(block, static, index) for index, number in self._mine(numbers)}
        every = {n: seen for part in block.ranks.gather(found) for n, seen in part.items()}
        inputs = {}
        for name in static:
            rows = [every[n][name] for n in sorted(every) if name in every[n]]
            if rows:
                inputs[name] = torch.cat(rows).to(block.device)
        return inputs

    @contextlib.contextmanager
    def _as_stored(self, candidate: Candidate, dtype: torch.dtype) -> Iterator[None]:
        """Let the block compute with the pair as it would be stored; dtype: of the computation."""
        block = self.block
        pair = folded(block, self.pair, candidate.factor)
        squares: dict[str, tuple[torch.Tensor, int]] = {}
        roundings: dict[str, Rounding] = {}
        for statistics, names in self.state.statistics(self.pair):
            rows = statistics.halves(block.device)[0] / pair.columns
            squares |= dict.fromkeys(names, (rows.square().sum(0), len(rows)))
            given = self.inputs[names[0]] / pair.columns if names[0] in self.inputs else rows
            if candidate.dynamic:
                roundings |= token_rounding(block.within, names)
            else:
                roundings |= shared_rounding(block.within, names, given, self._unserved)
        weights = {
            name: value
            for key, value in pair.tensors.items()
            if key.endswith(".weight")
            # the inputs of the Linear that feeds a pair are not known here
            and ((name := key.removesuffix(".weight")) in squares or not _unknown(block, name))
        }
        rounded = rounded_weights(block.within, weights, squares)
        changed = {name: value.to(dtype) for name, value in pair.tensors.items()}
        changed |= {f"{name}.weight": value.to(dtype) for name, value in rounded.items()}
        with replaced_tensors(block, changed), contextlib.ExitStack() as hooks:
            for name, rounding in roundings.items():
                hook = partial(_rounded_call, rounding)
                hooks.callback(block.within[name].register_forward_pre_hook(hook).remove)
            yield

    @property
    def _unserved(self) -> str:
        """How a static candidate is rounded if the observer says that no static scale serves it.

        With "dynamic" it stays static: whether dynamic scales serve better is measured.
        """
        return "note" if self.block.unserved == "dynamic" else self.block.unserved


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


def _is_static(module: Module, local: bool) -> bool:
    """Whether a module's inputs have a static scale; local: or a static global scale."""
    args = args_for(module, "input")
    return args is not None and (args.dynamic is False or (local and args.dynamic is not True))


def _unknown(block: Block, name: str) -> bool:
    return name in block.within and needs_importance(block.within[name])


def _rounded_call(rounding: Rounding, _module: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return (rounding(args[0]), *args[1:])
