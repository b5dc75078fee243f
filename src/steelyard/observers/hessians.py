"""Hessians of modules, H = sum of x^T x over their inputs.

Layers that are called with the same tensor (q, k and v; gate and up) share one Hessian. The first
batch determines which do; a later batch that differs raises. Each rank adds its own batches, and
`join` adds their partial sums in the fixed order of `kernels.partial_sums`, whatever the number of
ranks. Several threads add to a matrix, each to its own slabs.

An expert's Hessian covers only the tokens routed to it, each times its squared router weight. It is
shrunk toward the mean over all experts of the layer: `kernels.shrinkage`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch.nn import Module

from steelyard.distributed import Ranks, ThreadPool, partial_sums_of, sendable
from steelyard.errors import CalibrationError
from steelyard.fusion import expert_groups
from steelyard.kernels.partial_sums import Partial
from steelyard.kernels.shrinkage import isotropic, prior_factor, prior_tokens
from steelyard.observers.hessian_sums import HessianSum, Prior, Term
from steelyard.observers.padding import real_tokens

__all__ = ["Hessians"]

sendable(Partial)


class Hessians:
    """Hessians of the modules of one block.

    modules: by name
    offload: keep the Hessians on the CPU, wherever the modules are
    ranks:   the ranks of the run
    pool:    the threads that add to slabs
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
        self._queued: dict[HessianSum, list[Term]] = {}
        self._hessians: dict[str, HessianSum] = {}
        self._released: dict[str, int] = {}  # token counts of solved modules
        self._latest: HessianSum | None = None

    def see(
        self,
        names: Iterable[str],
        x: torch.Tensor,
        partial_sum: int = 0,
        weights: torch.Tensor | None = None,
        original: torch.Tensor | None = None,
        batch: int = 0,
    ) -> None:
        """Queue the shared input of modules; `flush` adds it.

        partial_sum: index of the batch's partial sum; see `kernels.partial_sums`
        weights:     (tokens,), factors on errors of the outputs; None for 1
        original:    the input in the unquantized model, to sum the drift; for all batches or none
        batch:       number of the batch in the run
        """
        names = [name for name in names if name in self.modules]
        drifting = {} if original is None else self._weights(names)
        for name in names:
            if (hessian := self._to_add(name, x, drifting)) is not None:
                real = _real(x)
                hessian.tokens += len(real)
                before = None if original is None else _real(original)
                term = Term(real, partial_sum, batch, weights, before)
                self._queued.setdefault(hessian, []).append(term)

    @torch.no_grad()
    def flush(self) -> None:
        """Add the queued inputs."""
        for hessian, terms in self._queued.items():
            hessian.add(terms, self.pool)
        self._queued.clear()

    def close(self) -> None:
        """Free the last inputs; call it after the last batch."""
        for hessian in self._hessians.values():
            hessian.last = None
        self._latest = None

    def _to_add(
        self, name: str, x: torch.Tensor, weights: Mapping[str, torch.Tensor]
    ) -> HessianSum | None:
        """Return the Hessian to add an input to; None if it contains the input already.

        weights: of all modules that get the input now, to sum its drift; empty not to
        """
        hessian = self._hessians.get(name)
        if hessian is None:
            latest = self._latest
            if latest is None or latest.last is not x or not latest.reads(name):
                device = torch.device("cpu") if self.offload else x.device
                first = partial_sums_of(self.ranks.rank, self.ranks.count).start
                latest = HessianSum(x.shape[-1], device, first, weights)
            hessian = self._hessians[name] = latest
        if hessian.last is x:  # already added for a layer that shares it
            return None
        if hessian.tokens and self._owner(hessian) != name:
            raise CalibrationError(
                f"{name} got another input than {self._owner(hessian)}, but shared its input in "
                "earlier batches: the Hessian that they share cannot be split"
            )
        hessian.last = x
        self._latest = hessian
        return hessian

    def _owner(self, hessian: HessianSum) -> str:
        return next(name for name, each in self._hessians.items() if each is hessian)

    def tokens(self, name: str) -> int:
        hessian = self._hessians.get(name)
        return self._released.get(name, 0) if hessian is None else hessian.tokens

    def join(self, owners: Mapping[str, int]) -> None:
        """Add the Hessians of all ranks; each rank calls this once, after the last batch.

        owners: the rank that needs a module's Hessian; the others discard theirs
        """
        if self.ranks.count == 1:
            return
        known: dict[tuple[str, ...], tuple[int, int, bool]] = {}  # by the modules that share it
        for shared in self.ranks.gather(self._described()):
            for names, (columns, tokens, drifts) in shared.items():
                known[names] = (columns, tokens + known.get(names, (0, 0))[1], drifts)
        if len({name for names in known for name in names}) != sum(map(len, known)):
            raise CalibrationError(
                "ranks disagree on which modules share an input: "
                + "; ".join(", ".join(names) for names in known)
            )
        for names in sorted(known):  # the same order on all ranks
            columns, tokens, drifts = known[names]
            mine = self._hessians.get(names[0])
            partials = [] if mine is None else [each.partials() for each in mine.sums()]
            device = self._device(names[0])
            weights = self._weights(names) if drifts else {}
            whole = HessianSum(columns, device, 0, weights)
            whole.tokens = tokens
            for owner in sorted({owners[name] for name in names}):
                for rank, found in enumerate(self.ranks.collect(partials, owner)):
                    own = rank == self.ranks.rank  # and sent to the next owner
                    for each, sums in zip(whole.sums(), found, strict=bool(found)):
                        each.extend(part.on(device, copy=own) for part in sums)
            self._hessians.update(dict.fromkeys(names, whole))

    def shrink(self, owners: Mapping[str, int]) -> None:
        """Shrink the Hessians of experts toward the mean of their layer, after `join`.

        owners: the rank that has a module's Hessian
        """
        for group in expert_groups(self.modules):
            reached = [n[0] for n in group.experts.values() if self.tokens(n[0])]
            if not reached:
                continue
            columns, total = self.columns(reached[0]), sum(map(self.tokens, reached))
            prior = self._prior(reached, owners, group.inner, prior_factor(columns, total))
            for names in group.experts.values():
                hessian = self._hessians.get(names[0])
                if hessian is None:
                    hessian = HessianSum(columns, self._device(names[0]), 0)
                hessian.prior = Prior(prior, prior_tokens(columns))
                self._hessians.update(dict.fromkeys(names, hessian))

    def _prior(
        self, names: Sequence[str], owners: Mapping[str, int], inner: bool, factor: float
    ) -> list[torch.Tensor]:
        """Return the sum of Hessians times a factor; for inner channels, its mean diagonal."""
        total: list[torch.Tensor] = []
        for name in names:
            found = self._hessians[name].totals() if owners.get(name, 0) == self.ranks.rank else []
            if self.ranks.count > 1:
                found = self.ranks.broadcast(found, owners.get(name, 0))
            if not total:
                total = [torch.zeros_like(slab) for slab in found]
            for one, other in zip(total, found, strict=True):
                one.add_(other.to(one.device), alpha=factor)
        if inner:
            mean = isotropic(torch.cat([slab.diagonal() for slab in total]))
            for slab in total:
                slab.zero_().diagonal().fill_(float(mean[0]))
        return [slab.to(self._device(names[0])) for slab in total]

    def _described(self) -> dict[tuple[str, ...], tuple[int, int, bool]]:
        """Return columns, tokens and whether drift is summed, by the modules that share H."""
        hessians: dict[int, list[str]] = {}
        for name, hessian in self._hessians.items():
            hessians.setdefault(id(hessian), []).append(name)
        first = {tuple(names): self._hessians[names[0]] for names in hessians.values()}
        return {names: (each.columns, each.tokens, each.drifts) for names, each in first.items()}

    def _device(self, name: str) -> torch.device:
        return torch.device("cpu") if self.offload else self._weight(name).device

    def columns(self, name: str) -> int:
        return int(self._weight(name).shape[1])

    def _weights(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        return {name: self._weight(name).data for name in names}

    def _weight(self, name: str) -> Any:
        return self.modules[name].weight

    def importance(self, name: str) -> tuple[torch.Tensor, int] | None:
        """Return the sum of x^2 per input channel, and its number of tokens; None without any."""
        hessian = self._hessians.get(name)
        if hessian is None:
            return None
        tokens = hessian.tokens + (hessian.prior.tokens if hessian.prior is not None else 0)
        return (hessian.diagonal(), tokens) if tokens else None

    def release(self, name: str) -> None:
        """Free the Hessian of a solved module; `tokens` still returns its count."""
        if (hessian := self._hessians.pop(name, None)) is not None:
            self._released[name] = hessian.tokens

    def hessian(self, name: str) -> torch.Tensor:
        """Return H of a module, (columns, columns) fp32; all zero if no token reached it."""
        hessian = self._hessians.get(name)
        if hessian is not None:
            return hessian.whole()
        columns = self.columns(name)
        return torch.zeros(columns, columns, device=self._weight(name).device)

    def halves(self, name: str) -> Any:
        """Return Hessians and drifts of even and odd batches; None where no drift was summed."""
        hessian = self._hessians.get(name)
        return None if hessian is None else hessian.halves()

    def prepare(self, names: Iterable[str], dampening_frac: float, held_out: bool = False) -> None:
        """Compute the matrices of modules, each once, before threads that share them need them.

        held_out: raise the dampening as far as held-out batches confirm it
        """
        needed = {self._hessians[name]: None for name in names if name in self._hessians}
        fits = (partial(h.fit, dampening_frac, held_out) for h in needed)
        self.pool.do(enumerate(fits))
        for hessian in needed:
            hessian.whole()

    def dampening_frac(self, name: str) -> float | None:
        """Return the dampening for a module, after `prepare`; None if no token reached it."""
        hessian = self._hessians.get(name)
        return None if hessian is None else hessian.dampening_frac

    def shifted(self, name: str) -> tuple[torch.Tensor, float] | None:
        """Return the weight to round to, after `prepare`, and the factor of the shift.

        None without drift; see `kernels.drift`.
        """
        hessian = self._hessians.get(name)
        if hessian is None or hessian.fitted is None:
            return None
        return hessian.fitted.shifted(self._weight(name).data, hessian.start(name))


def _real(x: torch.Tensor) -> torch.Tensor:
    """Return the tokens of an input that are not padding, (tokens, columns)."""
    return real_tokens(x, "input").detach().reshape(-1, x.shape[-1])
