"""Hessians of modules, H = sum of x^T x over their inputs.

Layers that are called with the same tensor (q, k and v; gate and up) share one Hessian. The first
pass finds out which do, and that must not change afterwards. Each rank gathers its own batches, and
`join` adds their partial sums in the fixed order of `kernels.partial_sums`, whatever the number of
ranks. Several threads add to a matrix, each to its own slabs.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from steelyard.distributed import Ranks, ThreadPool, assign, partial_sums_of, sendable
from steelyard.errors import CalibrationError
from steelyard.kernels.hessian import accumulate, empty_slab, slab_starts, symmetric
from steelyard.kernels.partial_sums import FixedOrderSum, Partial
from steelyard.observers.padding import real_tokens

__all__ = ["Hessians"]

sendable(Partial)

Term = tuple[int, torch.Tensor]  # number of the partial sum, and inputs (tokens, columns)


class _Hessian:
    """One Hessian, and the number of tokens that it was summed over."""

    def __init__(self, columns: int, device: torch.device, first: int) -> None:
        self.columns = columns
        self.device = device
        self.slabs = [
            FixedOrderSum(functools.partial(empty_slab, columns, start, device), first)
            for start in slab_starts(columns)
        ]
        self.tokens = 0
        self.last: torch.Tensor | None = None  # the last input
        self._whole: torch.Tensor | None = None

    def add(self, terms: Sequence[Term], pool: ThreadPool) -> None:
        costs = [self.columns - start for start in slab_starts(self.columns)]
        owners = assign(costs, pool.count)
        parts: list[list[FixedOrderSum]] = [[] for _ in range(pool.count)]
        for slab, owner in zip(self.slabs, owners, strict=True):
            parts[owner].append(slab)
        pool.do((i, functools.partial(self._add, s, terms)) for i, s in enumerate(parts) if s)

    def _add(self, slabs: Sequence[FixedOrderSum], terms: Iterable[Term]) -> None:
        for number, x in terms:
            wide = x.to(self.device, torch.float32)  # one at a time: it may be a copy
            for slab in slabs:
                accumulate(slab.partial_sum(number), wide)

    def whole(self) -> torch.Tensor:
        """Return the matrix, (columns, columns), after the last input; frees the slabs."""
        if self._whole is None:
            self._whole = symmetric([slab.total() for slab in self.slabs]).to(self.device)
            self.slabs.clear()
        return self._whole


class Hessians:
    """Hessians of the modules of one block.

    modules: by name
    offload: keep the Hessians on the CPU, wherever the modules are
    ranks:   the ranks that gather together
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
        self._noted: dict[_Hessian, list[Term]] = {}
        self._hessians: dict[str, _Hessian] = {}
        self._latest: _Hessian | None = None

    def see(self, names: Iterable[str], x: torch.Tensor, partial_sum: int = 0) -> None:
        """Note the common input of modules; `flush` adds it.

        partial_sum: number of the one that the batch belongs to; see `kernels.partial_sums`
        """
        for name in names:
            if name in self.modules and (hessian := self._to_add(name, x)) is not None:
                self._noted.setdefault(hessian, []).append(self._term(hessian, x, partial_sum))

    @torch.no_grad()
    def flush(self) -> None:
        """Add the noted inputs."""
        for hessian, terms in self._noted.items():
            hessian.add(terms, self.pool)
        self._noted.clear()

    def close(self) -> None:
        """Release the last inputs; call it after the last batch."""
        for hessian in self._hessians.values():
            hessian.last = None
        self._latest = None

    def _to_add(self, name: str, x: torch.Tensor) -> _Hessian | None:
        """Return the Hessian to add an input to; None if it contains the input already."""
        hessian = self._hessians.get(name)
        if hessian is None:
            latest = self._latest
            if latest is None or latest.last is not x:
                device = torch.device("cpu") if self.offload else x.device
                first = partial_sums_of(self.ranks.rank, self.ranks.count).start
                latest = _Hessian(x.shape[-1], device, first)
            hessian = self._hessians[name] = latest
        if hessian.last is x:  # already added for a layer that parts it
            return None
        if hessian.tokens and self._owner(hessian) != name:
            raise CalibrationError(
                f"{name} was called with another tensor than {self._owner(hessian)}, with which it "
                "shared its input before, so their Hessians can no longer be separated"
            )
        hessian.last = x
        self._latest = hessian
        return hessian

    def _term(self, hessian: _Hessian, x: torch.Tensor, partial_sum: int) -> Term:
        real = real_tokens(x, "input").detach().reshape(-1, x.shape[-1])
        hessian.tokens += len(real)
        return partial_sum, real

    def _owner(self, hessian: _Hessian) -> str:
        return next(name for name, each in self._hessians.items() if each is hessian)

    def tokens(self, name: str) -> int:
        return self._hessians[name].tokens if name in self._hessians else 0

    def join(self, owners: Mapping[str, int]) -> None:
        """Join the Hessians of all ranks; each rank calls this once, after the last batch.

        owners: the rank that needs a module's Hessian; the others discard it
        """
        if self.ranks.count == 1:
            return
        known: dict[tuple[str, ...], tuple[int, int]] = {}  # who parts -> columns, tokens
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
            mine = self._hessians.get(names[0])
            partials = [] if mine is None else [slab.partials() for slab in mine.slabs]
            whole = _Hessian(columns, self._device(names[0]), 0)
            whole.tokens = tokens
            for owner in sorted({owners[name] for name in names}):
                for found in self.ranks.collect(_copies(partials), owner):
                    if owner == self.ranks.rank and found:  # else it had no batch
                        for slab, part in zip(whole.slabs, found, strict=True):
                            slab.extend(part)
            self._hessians.update(dict.fromkeys(names, whole))

    def _described(self) -> dict[tuple[str, ...], tuple[int, int]]:
        hessians: dict[int, list[str]] = {}
        for name, hessian in self._hessians.items():
            hessians.setdefault(id(hessian), []).append(name)
        first = {tuple(names): self._hessians[names[0]] for names in hessians.values()}
        return {names: (hessian.columns, hessian.tokens) for names, hessian in first.items()}

    def _device(self, name: str) -> torch.device:
        weight: Any = self.modules[name].weight
        return torch.device("cpu") if self.offload else weight.device

    def columns(self, name: str) -> int:
        weight: Any = self.modules[name].weight
        return int(weight.shape[1])

    def diagonal(self, name: str) -> torch.Tensor:
        """Return the sum of x^2 of each input channel."""
        return self._hessians[name].whole().diagonal().clone()

    def hessian(self, name: str) -> torch.Tensor:
        """Return H of a module, (columns, columns) fp32; all zero if no token reached it."""
        hessian = self._hessians.get(name)
        if hessian is not None:
            return hessian.whole()
        weight: Any = self.modules[name].weight
        return torch.zeros(self.columns(name), self.columns(name), device=weight.device)


def _copies(partials: list[list[Partial]]) -> list[list[Partial]]:
    """Return copies on the CPU, which can be sent and added to."""

    def copy(value: torch.Tensor | None) -> torch.Tensor | None:
        return None if value is None else value.to("cpu", copy=True)

    return [[Partial(p.start, p.stop, copy(p.value)) for p in slab] for slab in partials]
