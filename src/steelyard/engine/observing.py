"""Runs batches through a block and passes the values at its modules to algorithms, in order."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Callable, Sequence
from typing import Any

from steelyard.algorithms import Seen
from steelyard.distributed import Ranks, ThreadPool
from steelyard.engine.block_work import Moment, Work
from steelyard.observers.padding import padding_mask

__all__ = ["observe"]


def observe(
    work: Work,
    forwards: Sequence[Callable[[], Any]],
    places: Sequence[tuple[int, int]],
    turn: int,
    pool: ThreadPool,
    ranks: Ranks,
) -> None:
    """Run all batches on the threads of a pool; replay the recorded values in batch order.

    places: of each batch, its number in the run and its partial sum
    turn:   number of the pass
    """
    noted: contextvars.ContextVar[list[tuple[int, Seen]]] = contextvars.ContextVar("noted")
    current: contextvars.ContextVar[Moment] = contextvars.ContextVar("current")

    def record(index: int) -> list[tuple[int, Seen]]:
        noted.set([])
        current.set(Moment(*places[index], turn))
        forwards[index]()
        return noted.get()

    def note(number: int, place: str, name: str, value: Any) -> None:
        now, mask = current.get(), padding_mask()
        if place == "input" and mask is not None and value.shape[:2] == mask.shape:
            value = value[mask.to(value.device)]
        seen = Seen(place, (name,), value, now.batch, now.partial_sum, now.turn)
        noted.get().append((number, seen))

    with work.hooked(note):
        for start in range(0, len(forwards), pool.count):
            some = range(start, min(start + pool.count, len(forwards)))
            for seen in pool.do((i, functools.partial(record, i)) for i in some):
                work.replay(seen)
                ranks.look()
