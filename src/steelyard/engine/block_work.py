"""Algorithms at work on one block, or on one stage of it: begin, see, join, transform, solve."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.nn import Module

from steelyard.algorithms import Algorithm, Block, ModuleResult, Needs, Seen
from steelyard.engine.attention_states import attention_modules, noting_states

__all__ = ["Moment", "Work"]


@dataclass(frozen=True)
class Moment:
    """Which batch runs: its number, its partial sum, and the pass."""

    batch: int = 0
    partial_sum: int = 0
    turn: int = 0


@dataclass(frozen=True)
class _Part:
    algorithm: Algorithm
    block: Block
    state: Any


class Work:
    """The algorithms of a recipe, each with its part of a block and its state for it.

    parts:        what each algorithm works on
    transforming: whether tensors are to be changed now, and nothing solved
    """

    def __init__(
        self, parts: Sequence[tuple[Algorithm, Block]], transforming: bool = False
    ) -> None:
        self.transforming = transforming
        self.parts = [_Part(algorithm, block, algorithm.begin(block)) for algorithm, block in parts]

    @property
    def passes(self) -> int:
        """How often the batches run through the block."""
        return max((part.algorithm.needs.passes for part in self.parts), default=1)

    # -- seeing -------------------------------------------------------------------------------

    def show(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        moment: Moment,
        weights: torch.Tensor | None = None,
    ) -> None:
        """Show the input that some modules have in common; `flush` must follow.

        weights: of tokens, where a router multiplies the outputs by them
        """
        for part in self.parts:
            common = tuple(name for name in names if name in part.block.modules)
            if common and part.algorithm.needs.inputs:
                self._see(part, "input", common, x, moment, weights)

    def flush(self) -> None:
        for part in self.parts:
            part.algorithm.flush(part.state)

    def take(self, seen: Sequence[tuple[int, Seen]]) -> None:
        """Show values that `hooked` noted, each to the part whose number it has."""
        for number, each in seen:
            part = self.parts[number]
            if each.turn < part.algorithm.needs.passes:
                part.algorithm.see(part.state, each)
                part.algorithm.flush(part.state)

    def _see(
        self,
        part: _Part,
        place: str,
        names: tuple[str, ...],
        value: Any,
        moment: Moment,
        weights: torch.Tensor | None = None,
    ) -> None:
        if moment.turn < part.algorithm.needs.passes:
            at = (moment.batch, moment.partial_sum, moment.turn)
            part.algorithm.see(part.state, Seen(place, names, value, *at, weights))

    @contextlib.contextmanager
    def hooked(
        self, note: Callable[[int, str, str, Any], None], shown: Collection[str] = ()
    ) -> Iterator[None]:
        """Call `note(part, place, module, value)` for each value that an algorithm needs.

        shown: modules whose inputs `show` gets instead
        """
        with contextlib.ExitStack() as hooks:
            for number, part in enumerate(self.parts):
                for name, module in part.block.modules.items():
                    needs = part.algorithm.needs
                    if name in shown:
                        needs = replace(needs, inputs=False)
                    for handle in _hooks(needs, module, number, name, note):
                        hooks.callback(handle.remove)
                if part.algorithm.needs.attention:
                    states = functools.partial(note, number)
                    attention = attention_modules(part.block)
                    hooks.enter_context(noting_states(attention, states))
            yield

    def see_now(self, moment: Callable[[], Moment]) -> Callable[[int, str, str, Any], None]:
        """Return a `note` for `hooked` that shows each value at once."""

        def note(number: int, place: str, name: str, value: Any) -> None:
            part = self.parts[number]
            self._see(part, place, (name,), value, moment())
            part.algorithm.flush(part.state)

        return note

    # -- after the last batch -----------------------------------------------------------------

    def join(self) -> None:
        for part in self.parts:
            part.algorithm.join(part.state, part.block)

    def transform(self) -> None:
        """Let each algorithm change the block; changes without `Block.change` are found, too."""
        for part in self.parts:
            if part.algorithm.transforms != self.transforming:
                continue
            before = part.block.digests() if self.transforming else {}
            with torch.set_grad_enabled(part.algorithm.needs.gradients):
                part.algorithm.transform(part.block, part.state)
            after = part.block.digests() if self.transforming else {}
            part.block.changed.update(n for n, digest in after.items() if before[n] != digest)

    def solve(self) -> dict[str, ModuleResult]:
        found: dict[str, ModuleResult] = {}
        for part in self.parts:
            with torch.set_grad_enabled(part.algorithm.needs.gradients):
                found.update(part.algorithm.solve(part.block, part.state))
        return found


def _hooks(
    needs: Needs,
    module: Module,
    number: int,
    name: str,
    note: Callable[[int, str, str, Any], None],
) -> Iterator[Any]:
    """Put the hooks on a module that an algorithm needs."""

    def called(_module: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if needs.calls:
            note(number, "call", name, (args, kwargs))
        if needs.inputs:
            inputs = args or tuple(kwargs.values())
            note(number, "input", name, inputs[0])

    def returned(_module: Module, _args: Any, output: Any) -> None:
        note(number, "output", name, output[0] if isinstance(output, tuple) else output)

    if needs.calls or needs.inputs:
        yield module.register_forward_pre_hook(called, with_kwargs=True)
    if needs.outputs:
        yield module.register_forward_hook(returned)
