"""Second moments of what flows into modules, H = sum of x^T x.

Layers that are called with the same tensor (q, k and v; gate and up) share one: it is computed once
and held once. Which layers do is seen in the first pass and must not change after it. Several ranks
gather each its own batches, and `meet` joins what they have, in the order of additions of
`kernels.partial_sums`, whatever their number. Several threads add to a matrix, each to slabs of
its own.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from steelyard.distributed import Ranks, ThreadPool, deal, lanes_of, sendable
from steelyard.errors import CalibrationError
from steelyard.kernels.hessian import accumulate, empty_slab, slab_starts, symmetric
from steelyard.kernels.partial_sums import LaneSum, Partial
from steelyard.observers.padding import real_tokens

__all__ = ["Hessians"]

sendable(Partial)

Term = tuple[int, torch.Tensor]  # a lane, and what a batch of it adds: (tokens, columns)


class _Moment:
    """One second moment, and how many tokens it was summed over."""

    def __init__(self, columns: int, device: torch.device, first: int) -> None:
        self.columns = columns
        self.device = device
        self.slabs = [
            LaneSum(functools.partial(empty_slab, columns, start, device), first)
            for start in slab_starts(columns)
        ]
        self.tokens = 0
        self.last: torch.Tensor | None = None  # what was added last
        self._whole: torch.Tensor | None = None

    def add(self, terms: Sequence[Term], pool: ThreadPool) -> None:
        costs = [self.columns - start for start in slab_starts(self.columns)]
        owners = deal(costs, pool.count)
        shares: list[list[LaneSum]] = [[] for _ in range(pool.count)]
        for slab, owner in zip(self.slabs, owners, strict=True):
            shares[owner].append(slab)
        pool.do((i, functools.partial(self._add, s, terms)) for i, s in enumerate(shares) if s)

    def _add(self, slabs: Sequence[LaneSum], terms: Iterable[Term]) -> None:
        for lane, x in terms:
            wide = x.to(self.device, torch.float32)  # one at a time: it may be a copy
            for slab in slabs:
                accumulate(slab.lane(lane), wide)

    def whole(self) -> torch.Tensor:
        """Return it, (columns, columns), when all was added; the slabs are given up for it."""
        if self._whole is None:
            self._whole = symmetric([slab.total() for slab in self.slabs]).to(self.device)
            self.slabs.clear()
        return self._whole


class Hessians:
    """The second moments of modules that run in one block.

    modules: those to gather for, by name
    offload: keep the moments on the CPU, wherever the modules are
    ranks:   those that gather together
    pool:    the threads that add
    """

    def __init__(
        self,
        modules: Mapping[str, Module],
        offload: bool = False,
        ranks: Ranks | None = None,
        pool: ThreadPool | None = None,
    ) -> None:
        self.modules = dict(modules)
        self.offload = offload
        self.ranks = ranks or Ranks()
        self.pool = pool or ThreadPool()
        self._noted: dict[_Moment, list[Term]] = {}
        self._moments: dict[str, _Moment] = {}
        self._latest: _Moment | None = None

    def see(self, names: Iterable[str], x: torch.Tensor, lane: int = 0) -> None:
        """Note the input that modules have in common; `flush` adds it.

        lane: number of the partial sum that the batch belongs to; see `kernels.partial_sums`
        """
        for name in names:
            if name in self.modules and (moment := self._to_add(name, x)) is not None:
                self._noted.setdefault(moment, []).append(self._term(moment, x, lane))

    @torch.no_grad()
    def flush(self) -> None:
        """Add what was noted."""
        for moment, terms in self._noted.items():
            moment.add(terms, self.pool)
        self._noted.clear()

    def close(self) -> None:
        """Forget the last inputs; none is seen after this."""
        for moment in self._moments.values():
            moment.last = None
        self._latest = None

    def _to_add(self, name: str, x: torch.Tensor) -> _Moment | None:
        """Return the moment that an input is to be added to; None if it is part of it already."""
        moment = self._moments.get(name)
        if moment is None:
            latest = self._latest
            if latest is None or latest.last is not x:
                device = torch.device("cpu") if self.offload else x.device
                first = lanes_of(self.ranks.rank, self.ranks.count).start
                latest = _Moment(x.shape[-1], device, first)
            moment = self._moments[name] = latest
        if moment.last is x:  # a layer that shares it was here first
            return None
        if moment.tokens and self._owner(moment) != name:
            raise CalibrationError(
                f"{name} was called with another tensor than {self._owner(moment)}, with which it "
                "shared its input before; their inputs cannot be told apart any more"
            )
        moment.last = x
        self._latest = moment
        return moment

    def _term(self, moment: _Moment, x: torch.Tensor, lane: int) -> Term:
        real = real_tokens(x, "input").detach().reshape(-1, x.shape[-1])
        moment.tokens += len(real)
        return lane, real

    def _owner(self, moment: _Moment) -> str:
        return next(name for name, each in self._moments.items() if each is moment)

    def tokens(self, name: str) -> int:
        return self._moments[name].tokens if name in self._moments else 0

    def meet(self, owners: Mapping[str, int]) -> None:
        """Bring together what all ranks gathered; each must call this, once, after the last batch.

        owners: the rank that needs the moment of a module; the others forget it
        """
        if self.ranks.count == 1:
            return
        known: dict[tuple[str, ...], tuple[int, int]] = {}  # who shares -> columns, tokens
        for shared in self.ranks.gather(self._described()):
            for names, (columns, tokens) in shared.items():
                known[names] = (columns, tokens + known.get(names, (0, 0))[1])
        if len({name for names in known for name in names}) != sum(map(len, known)):
            raise CalibrationError(
                "modules share their inputs in another way on one rank than on another: "
                + "; ".join(", ".join(names) for names in known)
            )
        for names in sorted(known):  # in one order on all ranks
            columns, tokens = known[names]
            mine = self._moments.get(names[0])
            partials = [] if mine is None else [slab.partials() for slab in mine.slabs]
            whole = _Moment(columns, self._device(names[0]), 0)
            whole.tokens = tokens
            for owner in sorted({owners[name] for name in names}):
                for found in self.ranks.collect(_copies(partials), owner):
                    if owner == self.ranks.rank and found:  # else it has seen no batch
                        for slab, part in zip(whole.slabs, found, strict=True):
                            slab.take(part)
            self._moments.update(dict.fromkeys(names, whole))

    def _described(self) -> dict[tuple[str, ...], tuple[int, int]]:
        moments: dict[int, list[str]] = {}
        for name, moment in self._moments.items():
            moments.setdefault(id(moment), []).append(name)
        first = {tuple(names): self._moments[names[0]] for names in moments.values()}
        return {names: (moment.columns, moment.tokens) for names, moment in first.items()}

    def _device(self, name: str) -> torch.device:
        weight: Any = self.modules[name].weight
        return torch.device("cpu") if self.offload else weight.device

    def columns(self, name: str) -> int:
        weight: Any = self.modules[name].weight
        return int(weight.shape[1])

    def diagonal(self, name: str) -> torch.Tensor:
        """Return the sum of x^2 of each input channel."""
        return self._moments[name].whole().diagonal().clone()

    def hessian(self, name: str) -> torch.Tensor:
        """Return H of a module, (columns, columns) fp32; all zero if no token reached it."""
        moment = self._moments.get(name)
        if moment is not None:
            return moment.whole()
        weight: Any = self.modules[name].weight
        return torch.zeros(self.columns(name), self.columns(name), device=weight.device)


def _copies(partials: list[list[Partial]]) -> list[list[Partial]]:
    """Return them on the CPU, where they can be sent, and joined without changing what is here."""

    def copy(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to("cpu", copy=True)

    return [[Partial(p.start, p.stop, copy(p.value)) for p in slab] for slab in partials]
