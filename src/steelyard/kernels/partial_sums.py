"""Sums of large matrices in an order that does not depend on how many ranks add them.

Batches are cut, in their order, into at most 16 runs, the lanes. A lane's batches are added one
after another, four lanes make a node, and four nodes make the whole:

    ((l0 + l1 + l2 + l3) + (l4 + ... + l7)) + ...

A rank takes a run of whole lanes and adds what it can. What is left, such as the first half of a
node, is added when the ranks come together. One process adds in the same order, with at most three
matrices in memory: the lane, the node and the whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch

__all__ = ["LANES", "LaneSum", "Partial", "lane_of"]

LANES = 16
_FAN = 4


def lane_of(batch: int, batches: int) -> int:
    return batch * LANES // batches


@dataclass
class Partial:
    """The sum of the lanes from `start` to before `stop`; no value where nothing was added."""

    start: int
    stop: int
    value: torch.Tensor | None


class LaneSum:
    """Adds up what one rank sees.

    zero:  makes an empty matrix
    first: the rank's first lane
    """

    def __init__(self, zero: Callable[[], torch.Tensor], first: int = 0) -> None:
        self._zero = zero
        self._first = first
        self._partials: list[Partial] = []
        self._spare: list[torch.Tensor] = []  # that were added to others

    def lane(self, number: int) -> torch.Tensor:
        """Return the matrix to which batches of a lane are added, in place; lanes come in order."""
        last = self._partials[-1] if self._partials else None
        if last is None or last.stop <= number:
            self.take([])
            empty = self._spare.pop().zero_() if self._spare else self._zero()
            self._partials.append(Partial(number, number + 1, empty))
        elif not last.start == number == last.stop - 1 or last.value is None:
            raise ValueError(f"lane {number} comes after lane {last.stop - 1}")
        value = self._partials[-1].value
        assert value is not None
        return value

    def partials(self) -> list[Partial]:
        """Return what is left to be joined with others'."""
        self.take([])
        self._spare.clear()
        return self._partials

    def take(self, partials: Iterable[Partial]) -> None:
        """Go on with what another has, of the lanes after these; add what may be added, in place.

        Nothing is known of the lanes before the first.
        """
        done: list[Partial] = []
        for partial in _without_gaps([*self._partials, *partials], self._first):
            done.append(partial)
            while len(done) > 1 and _next(done[-2], done[-1]):
                right, left = done.pop(), done.pop()
                done.append(Partial(left.start, right.stop, self._sum(left.value, right.value)))
        self._partials = done

    def total(self) -> torch.Tensor:
        """Return the sum, when all lanes were added or taken."""
        self.take([Partial(LANES, LANES, None)])
        self._spare.clear()
        assert len(self._partials) == 1, "partials came out of order"
        value = self._partials[0].value
        return self._zero() if value is None else value

    def _sum(self, first: torch.Tensor | None, second: torch.Tensor | None) -> torch.Tensor | None:
        if first is None or second is None:
            return second if first is None else first
        self._spare = [second]
        return first.add_(second)


def _without_gaps(partials: Iterable[Partial], at: int) -> Iterable[Partial]:
    """Stand in for lanes in which nothing was added."""
    for partial in partials:
        yield from (Partial(lane, lane + 1, None) for lane in range(at, partial.start))
        if partial.stop > partial.start:
            yield partial
        at = partial.stop


def _next(first: Partial, second: Partial) -> bool:
    """Whether `second` is a node, and `first` the nodes before it under the same parent."""
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
