"""Heartbeats: which ranks of a run are alive, their current layers, and why the run ends.

Every rank writes to the store of the process group: a heartbeat each second, its current layer, and
the reason if it fails. All ranks report the first reason written. One thread per rank calls the
store, since a call never returns while the process that holds the store is stopped; callers wait
for that thread with a timeout.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

__all__ = ["Liveness"]

T = TypeVar("T")

_BEAT = 1.0  # seconds between two heartbeats
_LOOK = 0.5  # seconds between two checks of the others
_ANSWER = 6.0  # seconds without a heartbeat, once an error is known
_SILENCE = 40.0  # seconds without a heartbeat, while no error is known
_ARRIVAL = 600.0  # seconds until the first heartbeat of a rank


class StoreSilent(Exception):
    """The store did not answer in time, or its process is gone."""


class Liveness:
    """Heartbeats of this rank, and its view of the others."""

    def __init__(self, rank: int, count: int, store: Any) -> None:
        self.rank = rank
        self.count = count
        self.reason: str | None = None  # why the run ends; None while it runs
        self.diagnosing = False
        self._store = store
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._answers = True  # whether the store does
        self._looked = 0.0
        self._beat = 0
        self._seen: dict[
            int, tuple[bytes, float]
        ] = {}  # rank -> its last heartbeat, and the time it came

    def start(self) -> None:
        """Send heartbeats from now on; the first before this returns."""
        self._thread = threading.Thread(target=self._live, name="heartbeats", daemon=True)
        self._thread.start()
        with contextlib.suppress(StoreSilent):
            self._ask(self._sign)

    def stop(self) -> None:
        if self._thread is not None:
            self._calls.put(None)
            self._thread.join(_ANSWER if self._answers else 0)  # abandon one that is stuck
            self._thread = None

    def at(self, place: str) -> None:
        """Write the current layer of this rank, for messages of other ranks if it stops there."""
        with contextlib.suppress(StoreSilent):
            self._ask(lambda: self._store.set(f"at/{self.rank}", place))

    def end(self, reason: str) -> None:
        """Write why the run ends, unless another rank has."""
        self.reason = self.reason or reason
        with contextlib.suppress(StoreSilent):
            if self._ask(lambda: self._store.add("reasons", 1)) == 1:
                self._ask(lambda: self._store.set("reason", reason))

    def speaks_first(self) -> bool:
        """Whether no other rank has printed the reason; True if the store does not answer."""
        try:
            return bool(self._ask(lambda: self._store.add("speakers", 1)) == 1)
        except StoreSilent:
            return True

    def look(self) -> str | None:
        """Return why the run ends, if another rank failed or is silent; checks twice a second."""
        now = time.monotonic()
        if self._thread is None or now - self._looked < _LOOK:
            return self.reason
        self._looked = now
        try:
            self.reason = self._ask(self._find_reason)
        except StoreSilent:
            self.reason = _holder_silent()
        return self.reason

    def diagnose(self) -> str | None:
        """Return which rank is missing, once an error is known; None if all are alive."""
        if self._thread is None:
            return None
        if self.reason is None:
            self.diagnosing = True
            try:
                self._diagnose()
            except StoreSilent:
                self.reason = _holder_silent()
            finally:
                self.diagnosing = False
        return self.reason

    def _diagnose(self) -> None:
        self._seen.clear()
        until = time.monotonic() + _ANSWER
        while self.reason is None and time.monotonic() < until:
            self.reason = self._ask(self._find_reason)
            time.sleep(_BEAT / 4)
        if self.reason is None:
            silent = self._ask(lambda: self._silent(_ANSWER - _BEAT, _ANSWER - _BEAT))
            if silent:
                self.end(self._ask(lambda: self._missing(silent)))

    # -- on the thread that calls the store ---------------------------------------------------

    def _live(self) -> None:
        due = time.monotonic() + _BEAT
        while True:
            try:
                call = self._calls.get(timeout=max(due - time.monotonic(), 0))
            except queue.Empty:
                due = time.monotonic() + _BEAT
                with contextlib.suppress(Exception):  # the next caller gets the error
                    self._sign()
                continue
            if call is None:
                return
            call()

    def _ask(self, function: Callable[[], T]) -> T:
        """Call `function` on the thread that calls the store, and return its result."""
        if not self._answers or self._thread is None:
            raise StoreSilent
        answer: Future[T] = Future()

        def call() -> None:
            try:
                answer.set_result(function())
            except Exception as error:
                self._answers = False
                answer.set_exception(StoreSilent(str(error)))

        self._calls.put(call)
        try:  # exceptions of signal handlers must pass: catch nothing wider
            return answer.result(_SILENCE)
        except TimeoutError:
            self._answers = False
            raise StoreSilent from None

    def _sign(self) -> None:
        self._beat += 1
        self._store.set(f"beat/{self.rank}", str(self._beat))

    def _find_reason(self) -> str | None:
        if self._store.check(["reason"]):
            return str(self._store.get("reason").decode())
        silent = self._silent(_SILENCE, _ARRIVAL)
        return self._missing(silent) if silent else None

    def _silent(self, seconds: float, arrival: float) -> list[int]:
        """Return the ranks without a new heartbeat for `seconds`.

        arrival: the limit for a rank that has sent none yet
        """
        now = time.monotonic()
        silent = []
        for rank in range(self.count):
            if rank == self.rank:
                continue
            known = self._store.check([f"beat/{rank}"])
            sign = self._store.get(f"beat/{rank}") if known else b""
            if rank not in self._seen or self._seen[rank][0] != sign:
                self._seen[rank] = (sign, now)
            if now - self._seen[rank][1] > (seconds if known else arrival):
                silent.append(rank)
        return silent

    def _missing(self, ranks: list[int]) -> str:
        return "; ".join(f"rank {rank} {self._last_seen(rank)}" for rank in ranks)

    def _last_seen(self, rank: int) -> str:
        place = "before its first step"
        if self._store.check([f"at/{rank}"]):
            place = f"at {self._store.get(f'at/{rank}').decode()}"
        return (
            f"does not answer, and was last heard of {place}: it was killed, for example for want "
            "of memory, or it hangs"
        )


def _holder_silent() -> str:
    """Return the reason when the process that holds the store is gone or stopped."""
    who = "torchrun" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
    return f"{who}, which connects the ranks, does not answer: it was killed, or it hangs"
