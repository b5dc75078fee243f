"""Finds the balanced pairs of a block from one batch, whatever the names of its modules.

A norm is a candidate for all modules that read its output. A Linear before another one, such as up
before down or v before o, is a candidate if the widths fit. A candidate is accepted if the block
computes the same with a random factor folded in (`PairCheck`): that rejects a gate, which is not
linear in its output, and a norm whose output something else reads, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch.nn import Module

from steelyard.algorithms.block import Block
from steelyard.algorithms.mapped_pairs import mapped_pairs
from steelyard.algorithms.norm_probes import norm_offset
from steelyard.algorithms.pair_check import PairCheck
from steelyard.algorithms.pairs import Pair
from steelyard.algorithms.tracing import TracedCall, numbers_of, pattern_of, reads, trace
from steelyard.distributed import sendable

__all__ = ["Found", "find_pairs"]


@sendable
@dataclass
class Found:
    """The pairs of a block, and the modules that none balances: name -> reason."""

    pairs: list[Pair] = field(default_factory=list)
    unbalanced: dict[str, str] = field(default_factory=dict)


def find_pairs(block: Block, mappings: Sequence[tuple[str, Sequence[str]]] | None = None) -> Found:
    """Return the pairs that balance modules of a block, the same on every rank.

    mappings: patterns of sources, each with those of its readers; None finds them
    """
    found = _PairSearch(block).found(mappings) if len(block) else None
    every = block.ranks.gather(found)
    wide = [name for name, module in block.modules.items() if _width(module) is not None]
    unreached = Found(unbalanced=dict.fromkeys(wide, "no calibration batch reaches its layer"))
    return next((each for each in every if each is not None), unreached)


class _PairSearch:
    """The search in one block, on a rank that has a batch for it."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.calls = trace(block)
        self.check = PairCheck(block)
        self.wide = [name for name, call in self.calls.items() if len(call.shape) == 2]
        self.siblings: dict[str, dict[tuple[str, ...], str]] = {}
        for name, module in block.within.items():
            if _width(module) is not None:
                of_pattern = self.siblings.setdefault(pattern_of(name, block.name), {})
                of_pattern[numbers_of(name, block.name)] = name

    def found(self, mappings: Sequence[tuple[str, Sequence[str]]] | None) -> Found:
        result = Found()
        if mappings is not None:
            groups = mapped_pairs(self.block, mappings, self._fitted)
            accepted, reasons = self._accept(groups)
        else:
            accepted, reasons = self._all()
        result.pairs = [p for p in accepted if any(n in self.block.modules for n in p.readers)]
        balanced = {name for pair in accepted for name in pair.readers}
        for name in self.block.modules:
            if name not in balanced and _width(self.block.within[name]) is not None:
                result.unbalanced[name] = reasons.get(name) or self._reason(name, mappings)
        return result

    def _all(self) -> tuple[list[Pair], dict[str, str]]:
        """Return all pairs of the block, and why modules have none."""
        norms = [self._of_norm(call) for call in self.calls.values() if len(call.shape) == 1]
        fed = [pair for pair in norms if pair is not None]
        accepted, reasons = self._accept([pair] for pair in fed)
        done = {name for pair in fed for name in pair.readers}
        for name in self.wide:
            if name in done:
                continue
            group, reason = self._of_linear(name)
            accepted += group
            reasons.update(reason)
            done.update(reason, *(pair.readers for pair in group))
        return accepted, reasons

    def _reason(self, name: str, mappings: Any) -> str:
        if mappings is not None:
            return "no mapping names it"
        if name not in self.calls:
            return "the batch that pairs are found with does not reach it"
        return "no norm or Linear of the block makes its input"

    def _accept(self, groups: Iterable[Sequence[Pair]]) -> tuple[list[Pair], dict[str, str]]:
        """Return the pairs whose folding leaves the block's output, and why not the others'."""
        accepted: list[Pair] = []
        reasons: dict[str, str] = {}
        for group in groups:
            if (problem := self.check.problem(group)) is None:
                accepted += group
            else:
                reasons |= {name: problem for pair in group for name in pair.readers}
        return accepted, reasons

    # -- norms --------------------------------------------------------------------------------

    def _of_norm(self, call: TracedCall) -> Pair | None:
        """Return a norm with all modules that read its output, experts without tokens too."""
        size = call.shape[0]
        if call.output.shape[-1] != size:
            return None
        called = [n for n in self.wide if reads(self.calls[n].input, call.output)]
        readers = dict.fromkeys(
            sibling
            for name in called
            for sibling in self.siblings[pattern_of(name, self.block.name)].values()
        )
        fitting = tuple(n for n in readers if _width(self.block.within[n]) == size)
        if not fitting:
            return None
        return Pair(call.name, fitting, size, offset=self._offset(call.name))

    def _offset(self, name: str) -> float:
        call = self.calls[name]
        return norm_offset(self.block.within[name], call.input, call.output.dtype)

    # -- Linear layers ------------------------------------------------------------------------

    def _of_linear(self, name: str) -> tuple[list[Pair], dict[str, str]]:
        """Return the pairs of a Linear, and of its siblings in all experts, with one before it."""
        tried: list[str] = []
        for pair in self._sources(name):
            group = self._with_siblings(pair)
            if self.check.problem(group) is None:
                return group, {}
            tried.append(pair.source.removeprefix(f"{self.block.name}."))
        names = self.siblings[pattern_of(name, self.block.name)].values()
        if not tried:
            return [], dict.fromkeys(names, "no norm or Linear of the block makes its input")
        reason = f"its input is not proportional to the output of {' or '.join(tried)}"
        return [], dict.fromkeys(names, reason)

    def _sources(self, name: str) -> Iterator[Pair]:
        """Yield the candidates for the source of a Linear's input, the last called first."""
        own, before = self.calls[name], self.wide[: self.wide.index(name)]
        numbers = numbers_of(name, self.block.name)
        same = tuple(n for n in self.wide if self.calls[n].input.data_ptr() == own.input.data_ptr())
        for source in reversed(before):
            alike = numbers_of(source, self.block.name) == numbers
            pair = self._fitted(source, same) if alike else None
            if pair is not None:
                yield pair

    def _fitted(self, source: str, readers: Sequence[str]) -> Pair | None:
        """Return the pair of a Linear and its readers, if the widths fit."""
        module: Any = self.block.within[source]
        columns = _width(self.block.within[readers[0]])
        rows = module.weight.shape[0]
        if module.weight.ndim == 1:
            offset = self._offset(source) if source in self.calls else 0.0
            return Pair(source, tuple(readers), rows, offset=offset) if rows == columns else None
        if columns is None:
            return None
        if rows == columns:
            return Pair(source, tuple(readers), rows)
        parent: Any = self.block.within.get(source.rpartition(".")[0])
        head = getattr(parent, "head_dim", None)
        groups = getattr(parent, "num_key_value_groups", None)
        if isinstance(head, int) and rows < columns and columns % rows == 0 and rows % head == 0:
            return Pair(source, tuple(readers), rows, 0, columns // rows, head)
        if isinstance(head, int) and isinstance(groups, int) and columns % (groups * head) == 0:
            size = columns // groups  # v is the last part of a fused q, k and v
            return Pair(source, tuple(readers), size, rows - size, groups, head)
        if rows > columns:  # up is the last part of a fused gate and up
            return Pair(source, tuple(readers), columns, rows - columns)
        return None

    def _with_siblings(self, pair: Pair) -> list[Pair]:
        """Return the pairs at the same place in all experts."""
        block = self.block.name
        sources = self.siblings[pattern_of(pair.source, block)]
        readers = [self.siblings[pattern_of(name, block)] for name in pair.readers]
        return [
            replace(pair, source=source, readers=tuple(each[numbers] for each in readers))
            for numbers, source in sources.items()
            if all(numbers in each for each in readers)
        ]


def _width(module: Module) -> int | None:
    """Return the number of input channels of a Linear or a router; None for other modules."""
    weight = module._parameters.get("weight")
    return weight.shape[1] if weight is not None and weight.ndim == 2 else None
