"""A thread pool in which each worker computes whole batches, or slabs of a matrix.

An operation on the tensors of one batch is too small to split: two threads that share it mostly
wait for each other. So torch's threads are divided among the workers. The number per worker, and
with it the rounding of matrix products, depends only on torch's number of threads: it is one below
32 threads, two from there on, and so on.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

__all__ = ["ThreadPool"]

T = TypeVar("T")

_MOST = 16  # each holds a batch and the activations of its layer


class ThreadPool:
    """Workers that start with the first call and end on exit.

    count: number of worker threads; 1 runs in the calling thread
    """

    def __init__(self, count: int = 1) -> None:
        self.count = count
        self.threads = torch.get_num_threads()
        self.share = max(self.threads // count, 1)
        self._workers: list[ThreadPoolExecutor] = []

    @classmethod
    def on(cls, device: torch.device) -> ThreadPool:
        """Return a pool with torch's number of threads, at most 16; one for a GPU."""
        return cls(min(torch.get_num_threads(), _MOST) if device.type == "cpu" else 1)

    def __enter__(self) -> ThreadPool:
        return self

    def __exit__(self, *exc: object) -> None:
        for worker in self._workers:
            worker.shutdown(cancel_futures=True)
        self._workers.clear()

    def do(self, calls: Iterable[tuple[int, Callable[[], T]]]) -> list[T]:
        """Make all calls; return their results, in their order.

        calls: each with an index; one thread makes all calls of one index, in order
        """
        return list(self.begin(calls))

    def begin(self, calls: Iterable[tuple[int, Callable[[], T]]]) -> Generator[T, None, None]:
        """Make all calls and yield their results in order; exhaust or close it."""
        if self.count == 1:
            for _, call in calls:
                yield call()
            return
        while len(self._workers) < self.count:
            self._workers.append(ThreadPoolExecutor(1, initializer=self._start))
        futures: list[Future[T]] = []
        torch.set_num_threads(self.share)  # new threads take the last value set
        try:
            for number, call in calls:
                context = contextvars.copy_context()
                futures.append(self._workers[number % self.count].submit(context.run, call))
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
        torch.set_grad_enabled(False)  # torch keeps both settings per thread
        torch.set_num_threads(self.share)
