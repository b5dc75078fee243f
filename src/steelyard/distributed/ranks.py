"""The ranks of a run: what they tell each other, and what becomes of one that fails.

What is exchanged goes through the CPU and gloo, also beside NCCL: numbers found during calibration
are small, and an answer must not depend on the wires. Every wait looks out for ranks that failed.
A rank that fails says why, in the store that the process group was made with; the others stop and
repeat it. Meanwhile each rank gives a sign of life there every second. One that gives none, because
it was killed or stopped, is named by those that do.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import distributed as dist

from steelyard.distributed.packing import pack, unpack
from steelyard.errors import RanksError

__all__ = ["Ranks", "join_from_environment", "together"]

_GONE = "the process that holds the ranks together, rank 0 or torchrun, is gone"

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

_LOOK = 0.5  # seconds between two looks for ranks that failed
_BEAT = 1.0  # seconds between two signs of life
_ANSWER = 5.0  # seconds without one, when something is wrong already
_SILENCE = 60.0  # seconds without one, when nothing else is
_PATIENCE = timedelta(hours=2)  # that a rank waits for another which lives


def join_from_environment() -> None:
    """Join the process group that `torchrun` has prepared, if it did and nobody has joined yet."""
    if not dist.is_available() or dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE)


def together(function: Function) -> Function:
    """Make a function one that all ranks call, and of which each learns if it fails on another."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Ranks.current().together():
            return function(*args, **kwargs)

    return cast(Function, call)


class Ranks:
    """This process among those that do the run; alone where there is no process group."""

    _runs: ClassVar[int] = 0
    _active: ClassVar[Ranks | None] = None  # those of the run that is under way
    _side: ClassVar[tuple[Any, Any] | None] = None  # a process group, and gloo beside it

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None, store: Any = None) -> None:
        self.rank = rank
        self.count = count
        self.group = group
        self.store = store
        self.waited = 0.0  # seconds
        self._looked = 0.0
        self._announced = False
        self._beats: dict[int, tuple[bytes, float]] = {}  # the last of each rank, and when it came

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the process group that is there; every rank must ask.

        Within a run that was begun `together` they are the same for all who ask.
        """
        if cls._active is not None:
            return cls._active
        if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
            return cls()
        cls._runs += 1
        everyones = dist.distributed_c10d._get_default_store()
        store = dist.distributed_c10d.PrefixStore(f"steelyard-{cls._runs}", everyones)
        return cls(dist.get_rank(), dist.get_world_size(), cls._gloo(), store)

    @classmethod
    def _gloo(cls) -> Any:
        default = dist.group.WORLD
        if "gloo" in str(dist.get_backend_config()):
            return default
        if cls._side is None or cls._side[0] is not default:
            cls._side = (default, dist.new_group(backend="gloo"))
        return cls._side[1]

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    # -- telling each other ---------------------------------------------------------------------

    def gather(self, value: Value) -> list[Value]:
        """Return what every rank gave, in order of rank, on all of them."""
        if self.count == 1:
            return [value]
        own = pack(value)
        sizes = self._sizes(own)
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        self._do(lambda: dist.all_gather(found, padded, group=self.group, async_op=True))
        return [unpack(data[:size]) for data, size in zip(found, sizes, strict=True)]

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Return on all ranks what `source` gave; what the others give does not count."""
        if self.count == 1:
            return value
        own = pack(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = self._sizes(own)[source]
        data = own if self.rank == source else torch.empty(size, dtype=torch.uint8)
        self._do(lambda: dist.broadcast(data, source, group=self.group, async_op=True))
        return value if self.rank == source else unpack(data)

    def collect(self, value: Value, target: int = 0) -> Iterator[Value]:
        """Yield on `target` what every rank gave, in order, one at a time; it must take all.

        On the others there is nothing to take.
        """
        if self.count == 1:
            return iter([value])
        own = pack(None if self.rank == target else value)
        sizes = self._sizes(own)
        if self.rank == target:
            return self._received(value, own, sizes)
        for source in range(self.count):
            if source != target:
                self._move(own, source, target, 0)
        return iter(())

    def _received(self, value: Value, own: torch.Tensor, sizes: list[int]) -> Iterator[Value]:
        for source, size in enumerate(sizes):
            if source == self.rank:
                yield value
            else:
                yield unpack(self._move(own, source, self.rank, size))

    def _move(self, own: torch.Tensor, source: int, target: int, size: int) -> torch.Tensor:
        """Send from one rank to another; all must call, and `target` gets the bytes."""
        into, out = [0] * self.count, [0] * self.count
        if self.rank == source:
            out[target] = len(own)
        if self.rank == target:
            into[source] = size
        data = torch.empty(sum(into), dtype=torch.uint8)
        sent = own[: sum(out)]
        self._do(
            lambda: dist.all_to_all_single(data, sent, into, out, group=self.group, async_op=True)
        )
        return data

    def wait(self) -> None:
        """Return when every rank has come here."""
        self.gather(None)

    def _sizes(self, own: torch.Tensor) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        mine = torch.tensor([len(own)])
        self._do(lambda: dist.all_gather(sizes, mine, group=self.group, async_op=True))
        return [int(size) for size in sizes]

    def _do(self, begin: Callable[[], Any]) -> None:
        """Begin an exchange and wait for its end, or for a rank that fails."""
        started = time.monotonic()
        try:
            work, pause = begin(), 0.0
            while not work.is_completed():
                self.look()
                time.sleep(pause)
                pause = min(pause + 2e-5, 2e-3)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(self.inquest()) from error
        finally:
            self.waited += time.monotonic() - started

    # -- failing together ---------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Tell the others when this rank fails in here, and until then that it lives."""
        before, Ranks._active = Ranks._active, self
        ended = threading.Event()
        living = threading.Thread(target=self._live, args=[ended], daemon=True)
        if self.count > 1:
            living.start()
        try:
            yield
        except BaseException as error:
            self.announce(error)
            raise
        finally:
            ended.set()
            if self.count > 1:
                living.join(_ANSWER)  # a thread that is still in the store would abort the process
            Ranks._active = before

    def announce(self, error: BaseException) -> None:
        """Say that this rank fails, once.

        An error that another rank speaks of already gets the attribute `silent`, so that a program
        can say it once.
        """
        if self.count == 1 or self._announced:
            return
        self._announced = True
        with contextlib.suppress(Exception):  # the store may be gone
            error.__dict__["silent"] = self.store.add("speakers", 1) > 1
            if not isinstance(error, RanksError):
                self.store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")
                self.store.set("failed", str(self.rank))

    def _live(self, ended: threading.Event) -> None:
        with contextlib.suppress(Exception):
            beat = 0
            while not ended.wait(_BEAT):
                beat += 1
                self.store.set(f"beat/{self.rank}", str(beat))

    def at(self, place: str) -> None:
        """Say how far this rank has come, for the others' messages if it stops there."""
        if self.count > 1:
            with contextlib.suppress(Exception):
                self.store.set(f"at/{self.rank}", place)

    def look(self) -> None:
        """Raise if another rank failed, or gives no sign of life; asks at most twice a second."""
        now = time.monotonic()
        if self.count == 1 or now - self._looked < _LOOK:
            return
        self._looked = now
        try:
            if self.store.check(["failed"]):
                raise RanksError(self._reason())
            silent = self._silent(_SILENCE)
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(_GONE) from None  # with the process that held it
        if silent:
            raise RanksError(self._missing(silent))

    def inquest(self) -> str:
        """Find out who is missing, and return what to say of it."""
        try:
            until = time.monotonic() + _ANSWER
            self._beats.clear()
            while time.monotonic() < until:
                if self.store.check(["failed"]):
                    return self._reason()
                self._silent(_ANSWER)
                time.sleep(_BEAT / 4)
            silent = self._silent(_ANSWER - 2 * _BEAT)
            return self._missing(silent) if silent else "the ranks lost their connections"
        except RuntimeError:
            return _GONE

    def _silent(self, seconds: float) -> list[int]:
        """Return the ranks whose sign of life has not changed for so long."""
        now = time.monotonic()
        for rank in range(self.count):
            known = self.store.check([f"beat/{rank}"])
            beat = self.store.get(f"beat/{rank}") if known else b""
            if rank not in self._beats or self._beats[rank][0] != beat:
                self._beats[rank] = (beat, now)
        others = (rank for rank in range(self.count) if rank != self.rank)
        return [rank for rank in others if now - self._beats[rank][1] > seconds]

    def _reason(self) -> str:
        rank = int(self.store.get("failed"))
        return f"rank {rank} failed: {self.store.get(f'failed/{rank}').decode()}"

    def _missing(self, ranks: list[int]) -> str:
        return "; ".join(f"rank {rank} {self._last_seen(rank)}" for rank in ranks)

    def _last_seen(self, rank: int) -> str:
        place = "before its first step"
        if self.store.check([f"at/{rank}"]):
            place = f"at {self.store.get(f'at/{rank}').decode()}"
        return (
            f"does not answer, and was last heard of {place}: it was killed, for example for want "
            "of memory, or it hangs"
        )
