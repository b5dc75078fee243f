"""Sums of large matrices in an order that does not depend on how many ranks add them.

Batches are cut, in their order, into at most 16 runs, each with a partial sum. The batches of a run
are added one after another, four partial sums make a node, and four nodes make the total:

    ((p0 + p1 + p2 + p3) + (p4 + ... + p7)) + ...

A rank gets a range of whole runs and adds what it can. The rest, such as the first half of a node,
is added when the ranks join. One process adds in the same order, with at most three matrices in
memory: the partial sum, the node and the total.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

__all__ = ["PARTIAL_SUMS", "FixedOrderSum", "Partial", "begun", "partial_sum_of"]

PARTIAL_SUMS = 16
_FAN = 4


def partial_sum_of(batch: int, batches: int) -> int:
    return batch * PARTIAL_SUMS // batches


@dataclass
class Partial:
    """Sum of the partial sums from `start` to before `stop`; no value if nothing was added."""

    start: int
    stop: int
    value: torch.Tensor | None

    def on(self, device: torch.device, copy: bool) -> Partial:
        """Return it on a device."""
        value = None if self.value is None else self.value.to(device, copy=copy)
        return Partial(self.start, self.stop, value)


class FixedOrderSum:
    """Adds the batches of one rank.

    zero:  makes an empty matrix
    first: number of the rank's first partial sum
    """

    def __init__(self, zero: Callable[[], torch.Tensor], first: int = 0) -> None:
        self._zero = zero
        self._first = first
        self._partials: list[Partial] = []
        self._spare: list[torch.Tensor] = []  # free for reuse

    def partial_sum(self, number: int) -> torch.Tensor:
        """Return the matrix to add a run's batches to, in place; numbers must not decrease."""
        value, fresh = self.begin(number)
        return value.zero_() if fresh else value

    def begin(self, number: int) -> tuple[torch.Tensor, bool]:
        """Return that matrix, and whether it holds nothing yet: then its contents do not matter."""
        last = self._partials[-1] if self._partials else None
        if last is None or last.stop <= number:
            self.extend([])
            empty = self._spare.pop() if self._spare else self._zero()
            self._partials.append(Partial(number, number + 1, empty))
            return empty, True
        if not last.start == number == last.stop - 1 or last.value is None:
            raise ValueError(f"partial sum {number} comes after {last.stop - 1}")
        return last.value, False

    def partials(self) -> list[Partial]:
        """Return the sums that remain to be joined with those of other ranks."""
        self.extend([])
        self._spare.clear()
        return self._partials

    def extend(self, partials: Iterable[Partial]) -> None:
        """Append the partial sums of the next rank; add what the order allows, in place."""
        done: list[Partial] = []
        for partial in _without_gaps([*self._partials, *partials], self._first):
            done.append(partial)
            while len(done) > 1 and _next(done[-2], done[-1]):
                right, left = done.pop(), done.pop()
                done.append(Partial(left.start, right.stop, self._sum(left.value, right.value)))
        self._partials = done

    def total(self) -> torch.Tensor:
        """Return the total, after the last partial sum."""
        self.extend([Partial(PARTIAL_SUMS, PARTIAL_SUMS, None)])
        self._spare.clear()
        assert len(self._partials) == 1, "partials came out of order"
        value = self._partials[0].value
        return self._zero() if value is None else value

    def _sum(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        if first is None or second is None:
            return second if first is None else first
        self._spare = [*self._spare[-1:], second]  # with the node and the total, three matrices
        return first.add_(second)


@contextlib.contextmanager
def begun(sums: Iterable[FixedOrderSum], number: int) -> Iterator[tuple[list[torch.Tensor], bool]]:
    """Yield the matrices of several sums to add a run's batches to, and whether they hold nothing.

    They are zeros again if the device has no memory to write them.
    """
    found: list[tuple[torch.Tensor, bool]] = []
    try:
        for each in sums:
            found.append(each.begin(number))
        fresh = all(is_fresh for _, is_fresh in found)
        if not fresh:
            _clear(found)
        yield [matrix for matrix, _ in found], fresh
    except torch.OutOfMemoryError:
        _clear(found)
        raise


def _clear(found: Iterable[tuple[torch.Tensor, bool]]) -> None:
    for matrix, is_fresh in found:
        if is_fresh:
            matrix.zero_()


def _without_gaps(partials: Iterable[Partial], at: int) -> Iterable[Partial]:
    """Insert partial sums without a value for runs without batches."""
    for partial in partials:
        yield from (Partial(number, number + 1, None) for number in range(at, partial.start))
        if partial.stop > partial.start:
            yield partial
        at = partial.stop


def _next(first: Partial, second: Partial) -> bool:
    """Whether `second` is a node, and `first` the nodes before it with the same parent."""
    size, before = second.stop - second.start, first.stop - first.start
    parent = _FAN * size
    return (
        size in (1, _FAN)
        and second.start % size == 0
        and first.stop == second.start
        and first.start % parent == 0
        and size <= before < parent
        and before % size == 0
    )
