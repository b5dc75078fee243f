"""Runs the algorithms of a recipe on one block or stage: begin, see, join, transform, solve."""

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
    """The current batch: its number, its partial sum, and the pass."""

    batch: int = 0
    partial_sum: int = 0
    turn: int = 0


@dataclass(frozen=True)
class _Part:
    algorithm: Algorithm
    block: Block
    state: Any


class Work:
    """The algorithms of a recipe on one block, each with its modules and its state.

    parts:        each algorithm, with a block of the modules that it works on
    transforming: call `transform` only; nothing is solved
    """

    def __init__(
        self, parts: Sequence[tuple[Algorithm, Block]], transforming: bool = False
    ) -> None:
        self.transforming = transforming
        self.parts = [_Part(algorithm, block, algorithm.begin(block)) for algorithm, block in parts]

    @property
    def passes(self) -> int:
        """Number of passes of the batches through the block."""
        return max((part.algorithm.needs.passes for part in self.parts), default=1)

    # -- observing ----------------------------------------------------------------------------

    def show(
        self,
        names: Sequence[str],
        x: torch.Tensor,
        moment: Moment,
        weights: torch.Tensor | None = None,
        original: torch.Tensor | None = None,
        token_roots: torch.Tensor | None = None,
    ) -> None:
        """Pass an input that several modules share to the algorithms; call `flush` afterwards.

        weights:     (tokens,), by which a router multiplies the outputs
        original:    the input in the unquantized model
        token_roots: (tokens,), roots of the tokens' weights, for algorithms that need them
        """
        for part in self.parts:
            common = tuple(name for name in names if name in part.block.modules)
            if common and part.algorithm.needs.inputs:
                needs = part.algorithm.needs
                needed = original if needs.original_inputs else None
                factors = token_roots if weights is None and needs.token_weights else weights
                self._see(part, "input", common, x, moment, factors, needed)

    def flush(self) -> None:
        for part in self.parts:
            part.algorithm.flush(part.state)

    def replay(self, seen: Sequence[tuple[int, Seen]]) -> None:
        """Pass values that `hooked` recorded to the algorithms, each with the part's number."""
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
        original: torch.Tensor | None = None,
    ) -> None:
        if moment.turn < part.algorithm.needs.passes:
            at = (moment.batch, moment.partial_sum, moment.turn)
            part.algorithm.see(part.state, Seen(place, names, value, *at, weights, original))

    @contextlib.contextmanager
    def hooked(
        self, note: Callable[[int, str, str, Any], None], shown: Collection[str] = ()
    ) -> Iterator[None]:
        """Call `note(part, place, module, value)` for each value that an algorithm needs.

        shown: modules whose inputs go through `show` instead
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
        """Return a `note` for `hooked` that passes each value to its algorithm at once."""

        def note(number: int, place: str, name: str, value: Any) -> None:
            part = self.parts[number]
            self._see(part, place, (name,), value, moment())
            part.algorithm.flush(part.state)

        return note

    # -- after the last batch -----------------------------------------------------------------

    def join(self) -> None:
        for part in self.parts:
            part.algorithm.join(part.state, part.block)

    def release(self, names: Collection[str]) -> None:
        """Leave modules as they are: no algorithm solves them."""
        for part in self.parts:
            for name in names:
                part.block.modules.pop(name, None)

    def transform(self) -> None:
        """Let each algorithm change the block; digests find changes made without `Block.change`."""
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
    """Register the hooks that an algorithm needs on a module."""

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
