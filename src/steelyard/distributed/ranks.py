"""The ranks of a run: their messages, and how all of them end when one fails.

Messages go through the CPU and gloo, even with NCCL: calibration results are small, and must not
depend on the transport. Every wait watches for ranks that failed or stopped responding
(`liveness`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch import distributed as dist

from steelyard.distributed.liveness import Liveness
from steelyard.distributed.packing import pack, unpack
from steelyard.errors import RanksError

__all__ = ["Ranks", "join_from_environment", "together"]

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

_PATIENCE = timedelta(hours=2)  # longest wait for a rank that is alive


def join_from_environment() -> None:
    """Join the process group of `torchrun`, if it started this process and none is joined yet."""
    if not dist.is_available() or dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local, backend = int(os.environ.get("LOCAL_RANK", "0")), "gloo"
    if torch.accelerator.is_available():
        if local < torch.accelerator.device_count():  # else all may compute on the CPU
            torch.accelerator.set_device_index(local)
        kind = str(torch.accelerator.current_accelerator())
        own = dist.Backend.default_device_backend_map.get(kind)  # such as nccl
        if own is not None and own != backend and dist.is_backend_available(own):
            backend = f"cpu:gloo,{kind}:{own}"
    dist.init_process_group(backend, timeout=_PATIENCE)


def together(function: Function) -> Function:
    """Decorate a function that all ranks call: if it fails on one, it fails on all."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with Ranks.current().together():
            return function(*args, **kwargs)

    return cast(Function, call)


class Ranks:
    """This process among the ranks of the run; the only one without a process group."""

    _runs: ClassVar[int] = 0
    _active: ClassVar[Ranks | None] = None  # those of the current run
    _side: ClassVar[tuple[Any, Any] | None] = None  # a process group, and its gloo group

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None, store: Any = None) -> None:
        self.rank = rank
        self.count = count
        self.group = group
        self.store = store
        self.waited = 0.0  # seconds
        self._liveness = Liveness(rank, count, store) if count > 1 else None
        self._announced = False

    @classmethod
    def current(cls) -> Ranks:
        """Return the ranks of the current process group; every rank must call this.

        Within `together` every call returns the same object.
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

    # -- messages -------------------------------------------------------------------------------

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order, on every rank."""
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
        """Return the value of `source` on all ranks; those of the others are ignored."""
        if self.count == 1:
            return value
        own = pack(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = self._sizes(own)[source]
        data = own if self.rank == source else torch.empty(size, dtype=torch.uint8)
        self._do(lambda: dist.broadcast(data, source, group=self.group, async_op=True))
        return value if self.rank == source else unpack(data)

    def collect(self, value: Value, target: int = 0) -> Iterator[Value]:
        """Yield the values of all ranks on `target`, in rank order; consume all of them.

        Yields nothing on the other ranks.
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
        """Return when every rank has called this."""
        self.gather(None)

    def _sizes(self, own: torch.Tensor) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        mine = torch.tensor([len(own)])
        self._do(lambda: dist.all_gather(sizes, mine, group=self.group, async_op=True))
        return [int(size) for size in sizes]

    def _do(self, begin: Callable[[], Any]) -> None:
        """Start an exchange and wait until it completes or a rank fails."""
        started = time.monotonic()
        work, pause = None, 0.0
        try:
            work = begin()
            while not work.is_completed():
                self.look()
                time.sleep(pause)
                pause = min(pause + 2e-5, 2e-3)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(self.diagnose() or "the ranks lost their connections") from error
        finally:
            self.waited += time.monotonic() - started
            if work is not None and not work.is_completed():
                _never_destroy(work, self.group, dist.group.WORLD, self.store)

    # -- failing together ---------------------------------------------------------------------

    @classmethod
    def active(cls) -> Ranks | None:
        """Return the ranks of the current run."""
        return cls._active

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Report to the other ranks that this one is alive, and its failure."""
        before, Ranks._active = Ranks._active, self
        liveness = self._liveness if before is not self else None  # already started otherwise
        if liveness is not None:
            liveness.start()
        try:
            yield
        except BaseException as error:
            self.announce(error)
            raise
        finally:
            if liveness is not None:
                liveness.stop()
            Ranks._active = before

    def announce(self, error: BaseException) -> None:
        """Report that this rank fails, once.

        An error that another rank has reported gets the attribute `silent`, so that a program can
        print it once.
        """
        if self._liveness is None or self._announced:
            return
        self._announced = True
        foreign = isinstance(error, RanksError)
        own = f"rank {self.rank} failed: {type(error).__name__}: {error}"
        self._liveness.end(str(error) if foreign else own)
        error.__dict__["silent"] = not self._liveness.speaks_first()

    def at(self, place: str) -> None:
        """Report the progress of this rank, for the others' messages if it stops there."""
        if self._liveness is not None:
            self._liveness.at(place)

    def look(self) -> None:
        """Raise if another rank failed or stopped responding."""
        if self._liveness is not None and (reason := self._liveness.look()):
            raise RanksError(reason)

    def diagnose(self) -> str | None:
        """Return which rank is missing; None if all respond."""
        return None if self._liveness is None else self._liveness.diagnose()

    def end(self, reason: str) -> NoReturn:
        """End the run with a reason: on this rank now, on the others at their next check."""
        if self._liveness is not None:
            self._liveness.end(reason)
        raise RanksError(reason)

    @property
    def ends(self) -> bool:
        """Whether this rank knows that the run fails, or is diagnosing why."""
        known = self._liveness
        return self._announced or (known is not None and (known.diagnosing or bool(known.reason)))


def _never_destroy(*things: Any) -> None:
    """Keep objects of torch from ever being destroyed, so that this process can end.

    The destructor of a gloo group waits for pending exchanges, and one with a stopped rank ends
    only with the group's timeout, hours later. Gloo cannot abort it.
    """
    for thing in things:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(thing))
