"""The ranks of a run: what they tell each other, and what becomes of one that fails.

What is exchanged goes through the CPU and gloo, also beside NCCL: numbers found during calibration
are small, and an answer must not depend on the wires. Every wait looks out for ranks that failed.
A rank that fails says why, in the store that the process group was made with; the others stop and
repeat it. One that says nothing, because it was killed or hangs, is named by those that do.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import distributed as dist

from steelyard.errors import RanksError

__all__ = ["Ranks", "join_from_environment", "together"]

Value = TypeVar("Value")
Function = TypeVar("Function", bound=Callable[..., Any])

_LOOK = 0.5  # seconds between two looks for ranks that failed
_ANSWER = 5.0  # seconds that a rank has to say that it is alive


def join_from_environment() -> None:
    """Join the process group that `torchrun` has prepared, if it did and nobody has joined yet."""
    if not dist.is_available() or dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo")


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
        own = _pack(value)
        sizes = self._sizes(own)
        longest = max(sizes)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        self._do(lambda: dist.all_gather(found, padded, group=self.group, async_op=True))
        return [_unpack(data[:size]) for data, size in zip(found, sizes, strict=True)]

    def broadcast(self, value: Value, source: int = 0) -> Value:
        """Return on all ranks what `source` gave; what the others give does not count."""
        if self.count == 1:
            return value
        own = _pack(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        size = self._sizes(own)[source]
        data = own if self.rank == source else torch.empty(size, dtype=torch.uint8)
        self._do(lambda: dist.broadcast(data, source, group=self.group, async_op=True))
        return value if self.rank == source else _unpack(data)

    def collect(self, value: Value, target: int = 0) -> list[Value]:
        """Return what every rank gave, in order of rank, on `target`; on the others nothing."""
        if self.count == 1:
            return [value]
        own = _pack(None if self.rank == target else value)
        sizes = self._sizes(own)
        padded = torch.zeros(max(sizes), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in sizes] if self.rank == target else None
        self._do(lambda: dist.gather(padded, found, target, group=self.group, async_op=True))
        if found is None:
            return []
        values = [_unpack(data[:size]) for data, size in zip(found, sizes, strict=True)]
        values[target] = value
        return values

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
                self._look()
                time.sleep(pause)
                pause = min(pause + 2e-5, 2e-3)
            work.wait()
        except RuntimeError as error:
            if isinstance(error, RanksError):
                raise
            raise RanksError(self._inquest()) from error
        finally:
            self.waited += time.monotonic() - started

    # -- failing together ---------------------------------------------------------------------

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Tell the others when this rank fails in here.

        An error that another rank speaks of already has the attribute `silent`, so that a program
        can say it once.
        """
        before, Ranks._active = Ranks._active, self
        try:
            yield
        except BaseException as error:
            if self.count > 1:
                with contextlib.suppress(Exception):  # the store may be gone
                    error.__dict__["silent"] = self.store.add("speakers", 1) > 1
                    if not isinstance(error, RanksError):
                        self.store.set(f"failed/{self.rank}", f"{type(error).__name__}: {error}")
                        self.store.set("failed", str(self.rank))
            raise
        finally:
            Ranks._active = before

    def at(self, place: str) -> None:
        """Say how far this rank has come, for the others' messages if it stops there."""
        if self.count > 1:
            with contextlib.suppress(Exception):
                self.store.set(f"at/{self.rank}", place)

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._looked < _LOOK:
            return
        self._looked = now
        try:
            failed = self.store.check(["failed"])
        except RuntimeError:  # it went with the process that held it
            raise RanksError(self._inquest()) from None
        if failed:
            raise RanksError(self._reason(int(self.store.get("failed"))))

    def _reason(self, rank: int) -> str:
        return f"rank {rank} failed: {self.store.get(f'failed/{rank}').decode()}"

    def _inquest(self) -> str:
        """Find out who is missing; every rank that still can calls this when an exchange fails."""
        try:
            self.store.set(f"alive/{self.rank}", "1")
            silent = list(range(self.count))
            until = time.monotonic() + _ANSWER
            while silent and time.monotonic() < until:
                if self.store.check(["failed"]):
                    return self._reason(int(self.store.get("failed")))
                silent = [rank for rank in silent if not self.store.check([f"alive/{rank}"])]
                time.sleep(0.05)
            if not silent:
                return "the ranks lost their connections to each other"
            return "; ".join(f"rank {rank} {self._last_seen(rank)}" for rank in silent)
        except RuntimeError:
            return "the process that holds the ranks together, rank 0 or torchrun, is gone"

    def _last_seen(self, rank: int) -> str:
        place = "before its first step"
        if self.store.check([f"at/{rank}"]):
            place = f"at {self.store.get(f'at/{rank}').decode()}"
        return (
            f"does not answer, and was last heard of {place}: it was killed, for example for want "
            "of memory, or it hangs"
        )


class _Pickler(pickle.Pickler):
    """Sends tensors as their bytes: torch's own way does not know all types."""

    def reducer_override(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        return _tensor, (bytearray(flat.numpy()), value.dtype, tuple(value.shape))


def _tensor(data: bytearray, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).reshape(shape)


def _pack(value: Any) -> torch.Tensor:
    stream = io.BytesIO()
    _Pickler(stream, protocol=5).dump(value)
    return torch.frombuffer(bytearray(stream.getbuffer()), dtype=torch.uint8)


def _unpack(data: torch.Tensor) -> Any:
    return pickle.loads(data.numpy().tobytes())
