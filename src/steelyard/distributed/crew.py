"""Threads that work beside each other, each on a batch or on a part of a matrix.

An operation on the tensors of one batch is too small to be worth cutting into pieces: two threads
that share it spend much of their time on meeting. So each thread of a crew computes alone, with its
share of torch's threads. That share, and with it the rounding of matrix products, depends on how
many threads torch has and on nothing else: it is one up to 16, and for those above twice as many.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

__all__ = ["Crew"]

T = TypeVar("T")

_MOST = 16  # each holds a batch, and what its layer makes of it


class Crew:
    """Threads that are started when there is something to do, and end on exit.

    count: how many; one alone is whoever calls
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.threads = torch.get_num_threads()
        self.share = max(self.threads // count, 1)
        self._hands: list[ThreadPoolExecutor] = []

    @classmethod
    def on(cls, device: torch.device) -> Crew:
        """Return as many as torch has threads, but not more than 16; one for a GPU."""
        return cls(min(torch.get_num_threads(), _MOST) if device.type == "cpu" else 1)

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exc: object) -> None:
        for hand in self._hands:
            hand.shutdown(cancel_futures=True)
        self._hands.clear()

    def do(self, calls: Iterable[tuple[int, Callable[[], T]]]) -> list[T]:
        """Make all calls; return what they return, in their order.

        calls: each with a number; those of one number are made by one thread, in their order
        """
        return list(self.begin(calls))

    def begin(self, calls: Iterable[tuple[int, Callable[[], T]]]) -> Generator[T, None, None]:
        """Make all calls, and yield what they return as it comes; must be ended or closed."""
        if self.count == 1:
            for _, call in calls:
                yield call()
            return
        while len(self._hands) < self.count:
            self._hands.append(ThreadPoolExecutor(1, initializer=self._start))
        futures: list[Future[T]] = []
        torch.set_num_threads(self.share)  # a thread that is new asks for what was set last
        try:
            for number, call in calls:
                context = contextvars.copy_context()
                futures.append(self._hands[number % self.count].submit(context.run, call))
            while futures:
                answer = futures[0].result()
                del futures[0]
                yield answer
        finally:
            for future in futures:
                future.cancel()
            try:
                wait(futures)
            finally:
                torch.set_num_threads(self.threads)

    def _start(self) -> None:
        torch.set_grad_enabled(False)  # which torch keeps for each thread, like the next
        torch.set_num_threads(self.share)
