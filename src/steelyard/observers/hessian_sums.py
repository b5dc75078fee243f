"""The sums behind one Hessian: H itself, and the drift of the inputs that it is made of.

H is summed in slabs (`kernels.hessian`), each in the fixed order of `kernels.partial_sums`. Given
the inputs x of the unquantized model beside those of the quantized one, x^, the drift is summed
too, (x - x^) x^^T. Even and odd batches have sums of their own, so that each half can judge a fit
to the other (`kernels.drift`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from steelyard.distributed import ThreadPool, assign
from steelyard.kernels.dampening import held_out_dampening
from steelyard.kernels.drift import InputDrift
from steelyard.kernels.hessian import (
    accumulate,
    accumulate_product,
    empty_slab,
    slab_starts,
    symmetric,
)
from steelyard.kernels.partial_sums import FixedOrderSum

__all__ = ["HessianSum", "Prior", "Term"]


@dataclass(frozen=True)
class Term:
    """The input of one batch.

    x:           (tokens, columns)
    partial_sum: index of the batch's partial sum
    batch:       number of the batch in the run
    weights:     (tokens,), the router's factors on the outputs; None for 1
    original:    (tokens, columns), the input in the unquantized model, where it is known
    """

    x: torch.Tensor
    partial_sum: int = 0
    batch: int = 0
    weights: torch.Tensor | None = None
    original: torch.Tensor | None = None

    def halves(self) -> list[Term]:
        """Return the tokens in two terms."""
        middle = len(self.x) // 2
        parts: list[Term] = []
        for some in (slice(middle), slice(middle, None)):
            weights = None if self.weights is None else self.weights[some]
            original = None if self.original is None else self.original[some]
            parts.append(replace(self, x=self.x[some], weights=weights, original=original))
        return parts


_Halves = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class HessianSum:
    """One Hessian, and the number of tokens it sums over.

    drifts: whether the drift of the inputs is summed too; then `slabs` has the odd batches alone
    """

    def __init__(
        self, columns: int, device: torch.device, first: int, drifts: bool = False
    ) -> None:
        self.columns = columns
        self.device = device
        self.drifts = drifts
        starts = slab_starts(columns)
        empty = functools.partial(empty_slab, columns, device=device)
        self.slabs = [FixedOrderSum(functools.partial(empty, start), first) for start in starts]
        self._even: list[FixedOrderSum] = []
        self._drift: tuple[list[FixedOrderSum], list[FixedOrderSum]] = ([], [])
        if drifts:
            self._even = [FixedOrderSum(functools.partial(empty, start), first) for start in starts]
            for half in self._drift:
                half += [FixedOrderSum(self._rows(start), first) for start in starts]
        self.tokens = 0
        self.last: torch.Tensor | None = None  # the last input
        self.prior: Prior | None = None
        self._whole: torch.Tensor | None = None
        self.fitted: InputDrift | None = None
        self.dampening_frac: float | None = None  # chosen by `fit`

    def _rows(self, start: int) -> Callable[[], torch.Tensor]:
        """Return what makes an empty slab of whole rows."""
        rows = len(empty_slab(self.columns, start, "meta"))
        return functools.partial(torch.zeros, rows, self.columns, device=self.device)

    def sums(self) -> list[FixedOrderSum]:
        """Return all sums, to be joined with those of other ranks."""
        return [*self.slabs, *self._even, *self._drift[0], *self._drift[1]]

    def add(self, terms: Sequence[Term], pool: ThreadPool) -> None:
        costs = [self.columns - start for start in slab_starts(self.columns)]
        if self.drifts:
            costs = [cost + 2 * self.columns for cost in costs]
        owners = assign(costs, pool.count)
        assigned: list[list[int]] = [[] for _ in range(pool.count)]
        for index, owner in enumerate(owners):
            assigned[owner].append(index)
        pool.do((i, functools.partial(self._add, s, terms)) for i, s in enumerate(assigned) if s)

    def _add(self, indices: Sequence[int], terms: Iterable[Term]) -> None:
        """Add inputs to some of the slabs."""
        starts = [slab_starts(self.columns)[index] for index in indices]
        for term in terms:
            self._add_term(indices, starts, term)

    def _add_term(
        self, indices: Sequence[int], starts: Sequence[int], term: Term, squares: bool = True
    ) -> None:
        """Add one input; in halves if the device cannot hold the copies that the sums need.

        squares: False if x^T x was added already
        """
        try:
            x = term.x.to(self.device)  # one at a time: it may be a copy
            if term.weights is not None:
                x = x.float() * term.weights.to(self.device, torch.float32)[:, None]
            if squares:
                sums = self._even if self.drifts and term.batch % 2 == 0 else self.slabs
                accumulate([sums[index].partial_sum(term.partial_sum) for index in indices], x)
                squares = False
            if term.original is not None:
                # The difference of bf16 inputs is rounded to bf16: exact where they are close, and
                # else off by at most 2^-8 of it. Subtracting sums afterwards would lose more.
                off = term.original.to(self.device) - x
                drift = self._drift[term.batch % 2]
                slabs = [drift[index].partial_sum(term.partial_sum) for index in indices]
                accumulate_product(slabs, starts, off, x)
        except torch.OutOfMemoryError:  # raised before the sum was changed
            if len(term.x) == 1:
                raise
            for half in term.halves():
                self._add_term(indices, starts, half, squares)

    def totals(self) -> list[torch.Tensor]:
        """Return the slabs of the sum over all tokens, after the last input."""
        found = self._totals(self.slabs)
        if self.drifts:
            found = [odd + even for odd, even in zip(found, self._totals(self._even), strict=True)]
        return found

    def _totals(self, slabs: Iterable[FixedOrderSum]) -> list[torch.Tensor]:
        return [slab.total() for slab in slabs]

    def diagonal(self) -> torch.Tensor:
        """Return the diagonal of the matrix, after the last input."""
        if self._whole is not None:
            return self._whole.diagonal().clone()
        found = torch.cat([slab.diagonal() for slab in self.totals()])
        if self.prior is not None:
            found += torch.cat([slab.diagonal() for slab in self.prior.slabs])
        return found

    def whole(self) -> torch.Tensor:
        """Return the matrix, (columns, columns), after the last input; frees the slabs."""
        if self._whole is None:
            slabs = self.totals()
            if self.prior is not None:
                for slab, prior in zip(slabs, self.prior.slabs, strict=True):
                    slab.add_(prior)
            self._whole = symmetric(slabs)
            self.slabs.clear()
            self._even.clear()
        return self._whole

    def halves(self) -> _Halves | None:
        """Return Hessians and drifts of even and odd batches; None without drift."""
        if not self.drifts:
            return None
        even, odd = (symmetric(self._totals(slabs)) for slabs in (self._even, self.slabs))
        drifts = [torch.cat(self._totals(half)) for half in self._drift]
        return (even, odd), (drifts[0], drifts[1])

    def fit(self, dampening_frac: float, rows: int, held_out: bool = False) -> None:
        """Set `fitted` and `dampening_frac` if there is drift; call it before `whole`.

        rows:     of all weights that the input is multiplied with
        held_out: raise the dampening as far as odd batches confirm it for even ones
        """
        if self.dampening_frac is not None:
            return
        self.dampening_frac = dampening_frac
        if (halves := self.halves()) is None:
            return
        for half in self._drift:
            half.clear()
        if held_out:
            self.dampening_frac = held_out_dampening(*halves[0], dampening_frac)
        self.fitted = InputDrift(*halves, self.tokens, dampening_frac, rows)


@dataclass(frozen=True)
class Prior:
    """The layer's contribution to an expert's Hessian, and its weight in tokens."""

    slabs: list[torch.Tensor]
    tokens: int
