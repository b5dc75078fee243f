"""The ranks of a run: their messages, and how all of them end when one fails.

A message goes through the CPU and gloo. Its tensors on an accelerator follow from device to device,
if every rank has one of its own and the process group a backend for it, such as NCCL
(`device_channel`). Every wait watches for ranks that failed or stopped responding (`liveness`).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NoReturn, TypeVar, cast

import torch
from torch import distributed as dist

from steelyard.distributed.device_channel import DeviceChannel
from steelyard.distributed.liveness import Liveness
from steelyard.distributed.packing import Apart, pack, tensors_apart, unpack
from steelyard.distributed.process_group import gloo_group
from steelyard.errors import RanksError

__all__ = ["Ranks", "together"]

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])


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

    def __init__(self, rank: int = 0, count: int = 1, group: Any = None, store: Any = None) -> None:
        self.rank = rank
        self.count = count
        self.group = group
        self.store = store
        self.waited = 0.0  # seconds
        self.channel: DeviceChannel | None = None  # between the accelerators of all ranks
        self._opened = count == 1
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
        return cls(dist.get_rank(), dist.get_world_size(), gloo_group(), store)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    @property
    def way(self) -> str:
        """How tensors on a device reach the other ranks, for the plan; every rank must call it."""
        if self.count == 1:
            return ""
        channel = self._open()
        words = "through host memory (gloo)"
        if channel is not None:
            words = f"from device to device ({channel.backend})"
        return f"tensors go between ranks {words}"

    def _open(self) -> DeviceChannel | None:
        if not self._opened:
            self._opened, self.channel = True, DeviceChannel.open(self._numbers)
        return self.channel

    # -- messages -------------------------------------------------------------------------------

    def gather(self, value: Value) -> list[Value]:
        """Return the values of all ranks, in rank order, on every rank.

        Tensors that travel from device to device arrive on this rank's; its own are not copied.
        """
        if self.count == 1:
            return [value]
        own, apart = self._packed(value)
        sizes = self._numbers(len(own))
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        self._do(lambda: dist.all_gather(found, padded, group=self.group, async_op=True))
        messages = [data[:size] for data, size in zip(found, sizes, strict=True)]
        return [self._followed(data, source, apart) for source, data in enumerate(messages)]

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Return the value of `source` on all ranks; those of the others are ignored."""
        if self.count == 1:
            return value
        own, apart = self._packed(value if self.rank == source else None)
        size = self._numbers(len(own))[source]
        data = own if self.rank == source else torch.empty(size, dtype=torch.uint8)
        self._do(lambda: dist.broadcast(data, source, group=self.group, async_op=True))
        found: Value = self._followed(data, source, apart)
        return value if self.rank == source else found

    def collect(self, value: Value, target: int = 0) -> Iterator[Value]:
        """Yield the values of all ranks on `target`, in rank order; consume all of them.

        Yields nothing on the other ranks.
        """
        if self.count == 1:
            return iter([value])
        own, apart = self._packed(None if self.rank == target else value)
        sizes = self._numbers(len(own))
        if self.rank == target:
            return self._received(value, own, sizes)
        for source in range(self.count):
            if source != target:
                self._move(own, source, target, 0)
            if source == self.rank and self.channel is not None:
                self.channel.send(apart, target, self._do)
        return iter(())

    def _received(self, value: Value, own: torch.Tensor, sizes: list[int]) -> Iterator[Value]:
        for source, size in enumerate(sizes):
            if source == self.rank:
                yield value
                continue
            data = self._move(own, source, self.rank, size)
            tensors = self._room(data)
            if self.channel is not None:
                self.channel.receive(tensors, source, self._do)
            yield unpack(data, tensors)

    def _packed(self, value: Any) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """Return the bytes of a message, and the tensors that follow from device to device."""
        channel = self._open()
        apart = Apart(None if channel is None else channel.device)
        return pack(value, apart), apart.tensors

    def _followed(self, data: torch.Tensor, source: int, own: list[torch.Tensor]) -> Any:
        """Return the value of a message that all ranks have, once its tensors have followed.

        own: the tensors of this rank's message
        """
        tensors = own if self.rank == source else self._room(data)
        if self.channel is not None:
            self.channel.broadcast(tensors, source, self._do)
        return unpack(data, tensors)

    def _room(self, data: torch.Tensor) -> list[torch.Tensor]:
        """Return tensors to receive those into that follow a message."""
        described = tensors_apart(data)
        if described and self.channel is None:
            raise RanksError(
                "another rank sends tensors from device to device, but this rank opened no such "
                "connection; start all ranks with the same device"
            )
        return [] if self.channel is None else self.channel.empty(described)

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

    def _numbers(self, own: int) -> list[int]:
        """Return a number of each rank."""
        found = [torch.zeros(1, dtype=torch.int64) for _ in range(self.count)]
        mine = torch.tensor([own])
        self._do(lambda: dist.all_gather(found, mine, group=self.group, async_op=True))
        return [int(each) for each in found]

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
