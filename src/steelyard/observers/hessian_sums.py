"""The sums behind one Hessian: H itself, and the drift of the inputs that it is made of.

H is summed in slabs (`kernels.hessian`), each in the fixed order of `kernels.partial_sums`. Given
the inputs x of the unquantized model beside those of the quantized one, x^, the drift is summed
too, (x - x^) x^^T. Where the weights that read the input have fewer rows than half its columns,
W (x - x^) x^^T is summed instead, which is all that is needed of it and takes fewer products. Even
and odd batches have sums of their own, so that each half can judge a fit to the other
(`kernels.drift`).
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

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
from steelyard.kernels.partial_sums import FixedOrderSum, begun

__all__ = ["HessianSum", "Prior", "Term"]


@dataclass(frozen=True)
class Term:
    """The input of one batch.

    x:           (tokens, columns)
    partial_sum: index of the batch's partial sum
    batch:       number of the batch in the run
    weights:     (tokens,), factors on errors of the outputs; None for 1
    original:    (tokens, columns), the input in the unquantized model, where it is known
    """

    x: torch.Tensor
    partial_sum: int = 0
    batch: int = 0
    weights: torch.Tensor | None = None
    original: torch.Tensor | None = None

    def root(self, like: torch.Tensor) -> torch.Tensor:
        """Return the weights as a column, on the device and in the type of a tensor."""
        assert self.weights is not None
        return self.weights.to(like.device, like.dtype)[:, None]

    def some(self, tokens: slice) -> Term:
        """Return a term of some of the tokens."""
        weights = None if self.weights is None else self.weights[tokens]
        original = None if self.original is None else self.original[tokens]
        return replace(self, x=self.x[tokens], weights=weights, original=original)

    def halves(self) -> list[Term]:
        """Return the tokens in two terms."""
        middle = len(self.x) // 2
        return [self.some(slice(middle)), self.some(slice(middle, None))]


_Halves = tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class HessianSum:
    """One Hessian, and the number of tokens it sums over.

    weights: by name, those that read the input, if its drift is summed too; then `slabs` has the
             odd batches alone
    """

    def __init__(
        self,
        columns: int,
        device: torch.device,
        first: int,
        weights: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        self.columns = columns
        self.device = device
        self.drifts = bool(weights)
        self._weights = dict(weights or {})
        rows = [len(weight) for weight in self._weights.values()]
        self._starts = dict(zip(self._weights, itertools.accumulate([0, *rows]), strict=False))
        self.rows = sum(rows)
        self.multiplied = self.drifts and 2 * self.rows < columns
        starts = slab_starts(columns)
        empty = functools.partial(empty_slab, columns, device=device)
        self.slabs = [FixedOrderSum(functools.partial(empty, start), first) for start in starts]
        self._even: list[FixedOrderSum] = []
        self._drift: tuple[list[FixedOrderSum], list[FixedOrderSum]] = ([], [])
        if self.drifts:
            self._even = [FixedOrderSum(functools.partial(empty, start), first) for start in starts]
            for half in self._drift:
                half += [FixedOrderSum(self._empty(start), first) for start in self._drift_starts]
        self.tokens = 0
        self.last: torch.Tensor | None = None  # the last input
        self.prior: Prior | None = None
        self._whole: torch.Tensor | None = None
        self.fitted: InputDrift | None = None
        self.dampening_frac: float | None = None  # chosen by `fit`

    @property
    def _drift_starts(self) -> range:
        """The first row of each slab of the drift."""
        return slab_starts(self.rows if self.multiplied else self.columns)

    def _empty(self, start: int) -> Callable[[], torch.Tensor]:
        """Return what makes an empty slab of the drift, of whole rows."""
        rows = len(empty_slab(self.rows if self.multiplied else self.columns, start, "meta"))
        return functools.partial(torch.zeros, rows, self.columns, device=self.device)

    def reads(self, name: str) -> bool:
        """Whether the sums serve a module that reads the input."""
        return not self.multiplied or name in self._starts

    def start(self, name: str) -> int:
        """Return the first row of a module's weight in the multiplied drift."""
        return self._starts.get(name, 0)

    def sums(self) -> list[FixedOrderSum]:
        """Return all sums, to be joined with those of other ranks."""
        return [*self.slabs, *self._even, *self._drift[0], *self._drift[1]]

    def add(self, terms: Sequence[Term], pool: ThreadPool) -> None:
        outputs: list[torch.Tensor | None] = [None] * len(terms)
        if self.multiplied:
            outputs = list(
                pool.do((i, partial(self._early_output, t)) for i, t in enumerate(terms))
            )
        starts = slab_starts(self.columns)
        costs = [self.columns - start for start in starts]
        costs += [2 * self.columns for _ in self._drift_starts] if self.drifts else []
        assigned: list[tuple[list[int], list[int]]] = [([], []) for _ in range(pool.count)]
        for index, owner in enumerate(assign(costs, pool.count)):
            of_drift = index >= len(starts)
            assigned[owner][of_drift].append(index - len(starts) if of_drift else index)
        calls = enumerate(partial(self._add, *each, terms, outputs) for each in assigned)
        pool.do((i, call) for i, call in calls if any(assigned[i]))

    def _early_output(self, term: Term) -> torch.Tensor | None:
        """Return `_output`; None if the device cannot hold it, and `_add_term` needs halves."""
        try:
            return self._output(term)
        except torch.OutOfMemoryError:
            return None

    def _output(self, term: Term) -> torch.Tensor | None:
        """Return W (x - x^) of a batch, (tokens, rows), in the type of its inputs."""
        off = self._off(term)
        if off is None:
            return None
        weights = [each.to(self.device, off.dtype) for each in self._weights.values()]
        return torch.cat([torch.nn.functional.linear(off, each) for each in weights], -1)

    def _off(self, term: Term) -> torch.Tensor | None:
        """Return x - x^ of a batch, weighed like x^, if it is known.

        The difference of bf16 inputs is rounded to bf16: exact where they are close, and else off
        by at most 2^-8 of it. Subtracting sums afterwards would lose more.
        """
        if term.original is None:
            return None
        off = term.original.to(self.device) - term.x.to(self.device)
        return off if term.weights is None else off.mul_(term.root(off))

    def _add(
        self,
        indices: Sequence[int],
        of_drift: Sequence[int],
        terms: Sequence[Term],
        outputs: Sequence[torch.Tensor | None],
    ) -> None:
        """Add inputs to some of the slabs of H, and to some of the drift.

        outputs: W (x - x^) of each batch, where the drift is multiplied
        """
        for term, output in zip(terms, outputs, strict=True):
            # weighed tokens are copies: at a time no more than twice as much as the Hessian
            step = 2 * self.columns if term.weights is not None else max(len(term.x), 1)
            for start in range(0, len(term.x), step):
                tokens = slice(start, start + step)
                part = None if output is None else output[tokens]
                self._add_term(indices, of_drift, term.some(tokens), part)

    def _add_term(
        self,
        indices: Sequence[int],
        of_drift: Sequence[int],
        term: Term,
        output: torch.Tensor | None = None,
    ) -> None:
        """Add one input; in halves if the device cannot hold the copies that the sums need."""
        try:
            x = term.x.to(self.device)  # one at a time: it may be a copy
            if term.weights is not None:
                x = x * term.root(x)
            if indices:
                sums = self._even if self.drifts and term.batch % 2 == 0 else self.slabs
                with begun((sums[index] for index in indices), term.partial_sum) as (slabs, fresh):
                    accumulate(slabs, x, fresh=fresh)
                indices = ()  # not again in halves
            if of_drift:
                if output is None:
                    output = self._output(term) if self.multiplied else self._off(term)
                if output is not None:
                    drift = self._drift[term.batch % 2]
                    starts = [self._drift_starts[index] for index in of_drift]
                    some = (drift[index] for index in of_drift)
                    with begun(some, term.partial_sum) as (slabs, fresh):
                        accumulate_product(slabs, starts, output, x, fresh=fresh)
        except torch.OutOfMemoryError:  # raised before the sum was changed
            if len(term.x) == 1:
                raise
            for half in term.halves():
                self._add_term(indices, of_drift, half)

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
            return self._keep(symmetric(slabs))
        return self._whole

    def _keep(self, whole: torch.Tensor) -> torch.Tensor:
        """Keep the matrix instead of its slabs."""
        self._whole = whole
        self.slabs.clear()
        self._even.clear()
        return whole

    def halves(self) -> _Halves | None:
        """Return Hessians and drifts of even and odd batches; None without drift."""
        if not self.drifts:
            return None
        even, odd = (symmetric(self._totals(slabs)) for slabs in (self._even, self.slabs))
        drifts = [torch.cat(self._totals(half)) for half in self._drift]
        return (even, odd), (drifts[0], drifts[1])

    def fit(self, dampening_frac: float, held_out: bool = False) -> None:
        """Set `fitted` and `dampening_frac` if there is drift; call it before `whole`.

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
        hessians, drifts = halves
        if self.prior is None:
            self._keep(hessians[0] + hessians[1])
        self.fitted = InputDrift(
            hessians, drifts, self.tokens, dampening_frac, self.rows, self.multiplied
        )


@dataclass(frozen=True)
class Prior:
    """The layer's contribution to an expert's Hessian, and its weight in tokens."""

    slabs: list[torch.Tensor]
    tokens: int
