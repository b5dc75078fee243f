"""The base of algorithms that balance pairs: find them, observe their inputs, fold in factors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from steelyard.algorithms.algorithm import Algorithm, Needs, Seen
from steelyard.algorithms.block import Block
from steelyard.algorithms.input_statistics import InputStatistics
from steelyard.algorithms.pair_search import Found, find_pairs
from steelyard.algorithms.pairs import Pair, folded
from steelyard.algorithms.tracing import numbers_of
from steelyard.modifiers.balancing import BalancingModifier
from steelyard.plan.plan import Plan
from steelyard.words import count

__all__ = ["Balancing", "BalancingState"]

_TOKENS = 32768  # sampled in a block, over all of its modules
_FEWEST, _MOST = 64, 1024  # of one module


@dataclass
class BalancingState:
    """The pairs of a block, and the statistics of their inputs.

    block:   name of the block
    inputs:  by the name of the first reader of each input
    batches: numbers of this rank's batches, in order
    gains:   of each pair that is balanced by measurement, squared errors before and after
    outputs: of the block before it was changed, by the number of the batch
    """

    block: str
    found: Found = field(default_factory=Found)
    inputs: dict[str, InputStatistics] = field(default_factory=dict)
    batches: dict[int, None] = field(default_factory=dict)
    gains: list[tuple[float, float]] = field(default_factory=list)
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)

    def statistics(self, pair: Pair) -> Iterator[tuple[InputStatistics, list[str]]]:
        """Yield each input of a pair that saw tokens, with the readers that share it.

        The experts of a layer have inputs of their own; all others share one.
        """
        for names in self.shared(pair):
            known = [self.inputs[name] for name in names if name in self.inputs]
            if known and not known[0].is_empty:
                yield known[0], names

    def shared(self, pair: Pair) -> list[list[str]]:
        """Return the readers of a pair, by input."""
        by_number: dict[tuple[str, ...], list[str]] = {}
        for name in pair.readers:
            by_number.setdefault(numbers_of(name, self.block), []).append(name)
        return list(by_number.values())

    def magnitudes(self, pair: Pair, even: bool = False) -> torch.Tensor | None:
        """Return max|x| of the inputs of a pair, (size,); None if no token reached it.

        even: of even batches alone
        """
        found = [statistics.magnitudes(even) for statistics, _ in self.statistics(pair)]
        return pair.largest(torch.stack(found).amax(0)) if found else None


class Balancing(Algorithm):
    """Chooses a factor for each pair of a block, and folds it into the weights."""

    transforms = True
    modifier: BalancingModifier

    @property
    def needs(self) -> Needs:
        return Needs(inputs=True, layers=True)

    def factor(self, block: Block, pair: Pair, state: BalancingState) -> torch.Tensor | None:
        """Return the factor of a pair, (size,), the same on every rank; None to leave it."""
        raise NotImplementedError

    # -- what the engine calls ----------------------------------------------------------------

    def begin(self, block: Block) -> BalancingState:
        state = BalancingState(block.name)
        state.found = find_pairs(block, self.modifier.patterns_of_pairs())
        limit = max(_FEWEST, min(_MOST, _TOKENS // max(len(block.modules), 1)))
        for pair in state.found.pairs:
            for names in state.shared(pair):
                seen = next((name for name in names if name in block.modules), None)
                if seen is not None and seen not in state.inputs:
                    state.inputs[seen] = InputStatistics(limit, self.modifier.sample_device)
        return state

    def see(self, state: BalancingState, seen: Seen) -> None:
        steps = self.modifier.num_calibration_steps
        state.batches[seen.batch] = None
        if steps is not None and seen.batch >= steps:
            return
        for name in seen.modules:
            if name in state.inputs:
                state.inputs[name].add(seen.value, seen.batch)

    def join(self, state: BalancingState, block: Block) -> None:
        if block.ranks.count == 1:
            return
        own = {name: each.state() for name, each in state.inputs.items()}
        parts = block.ranks.gather(own)
        for name, statistics in state.inputs.items():
            statistics.restore([part[name] for part in parts], block.device)

    def transform(self, block: Block, state: BalancingState) -> None:
        for pair in state.found.pairs:
            factor = self.factor(block, pair, state)
            if factor is not None:
                for name, value in folded(block, pair, factor).tensors.items():
                    block.change(name, value)
        state.outputs.clear()
        self._note_gains(block, state)
        self._note_unbalanced(block, state)

    def memory(self, plan: Plan) -> int:
        widest = max((planned.shape[1] for planned in plan.quantized), default=0)
        return 4 * _TOKENS * widest

    def _note_gains(self, block: Block, state: BalancingState) -> None:
        if not state.gains:
            return
        shares = [1 - after / before for before, after in state.gains]
        mean, pairs = sum(shares) / len(shares), len(state.found.pairs)
        block.notes.append(
            f"{block.name}: {type(self.modifier).__name__} balanced {len(shares)} of "
            f"{count(pairs, 'pair')}, which takes {mean:.1%} off their squared error on average"
        )

    def _note_unbalanced(self, block: Block, state: BalancingState) -> None:
        """Note the modules that no pair balances, one line for each reason."""
        reasons: dict[str, list[str]] = {}
        for name, reason in state.found.unbalanced.items():
            reasons.setdefault(reason, []).append(name)
        for reason, names in reasons.items():
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            step = type(self.modifier).__name__
            block.notes.append(f"{names[0]}{more}: input not balanced by {step}, since {reason}")
