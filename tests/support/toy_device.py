"""An accelerator that is none: its memory is the host's, and its rules are those of a GPU.

`torch.device("toy")` after `install()`. A tensor on it wraps a CPU tensor, and every operation runs
on the CPU, so a run on it must write the CPU's bytes. As on a GPU, tensors of two devices do not
mix, memory is limited and counted, and a copy on a side stream is not there before somebody waits.
Every transfer is logged.

torch knows one such device per process, for good: install it in a process of its own.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyDeviceGuard,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)

aten = torch.ops.aten
ORIGINAL = torch.nn.functional.scaled_dot_product_attention
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default}
INDEXING |= {aten._index_put_impl_.default, aten._unsafe_index.Tensor}


@dataclass(frozen=True)
class Transfer:
    """One copy between the host and the device."""

    to_device: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    nbytes: int
    pinned: bool
    stream: str


@dataclass
class Memory:
    """Bytes in use on one device, the most that ever were, and its transfers."""

    limit: int = 1 << 40
    blocks: dict[int, int] = field(default_factory=dict)
    peak: int = 0
    transfers: list[Transfer] = field(default_factory=list)
    refused: int = 0

    def reset(self, limit: int = 1 << 40) -> None:
        self.limit, self.peak, self.refused = limit, self.used, 0
        self.transfers.clear()

    @property
    def used(self) -> int:
        return sum(list(self.blocks.values()))  # a list: other threads take and give

    def taken(self, block: int, nbytes: int) -> None:
        if self.used + nbytes > self.limit:
            self.refused += 1
            raise torch.OutOfMemoryError(
                f"toy out of memory. Tried to allocate {nbytes} bytes; {self.used} of "
                f"{self.limit} are in use"
            )
        self.blocks[block] = nbytes
        self.peak = max(self.peak, self.used)


MEMORY = [Memory(), Memory()]
"""By device index."""


class Stream:
    """A queue of work; `missing` are the blocks written in it that the other has not waited for."""

    def __init__(self, device: Any = None, name: str = "side") -> None:
        self.name = name
        self.missing: weakref.WeakSet[Block] = weakref.WeakSet()

    def wait_stream(self, other: Stream) -> None:
        for block in list(other.missing):
            block.writers.discard(other)
        other.missing.clear()

    def synchronize(self) -> None:
        MAIN.wait_stream(self)


MAIN = Stream(name="main")
_local = threading.local()


def current_stream(device: Any = None) -> Stream:
    return getattr(_local, "stream", MAIN)


@contextlib.contextmanager
def stream(asked: Stream) -> Iterator[None]:
    before = current_stream()
    _local.stream = asked
    try:
        yield
    finally:
        _local.stream = before


_NUMBERS = itertools.count()


class Block:
    """Memory of one storage, counted while a tensor on the device uses it."""

    live: ClassVar[weakref.WeakValueDictionary[int, Block]] = weakref.WeakValueDictionary()

    def __init__(self, storage: torch.UntypedStorage, index: int) -> None:
        self.writers: set[Stream] = set()
        self.known_to = {current_stream()}  # the allocator keeps it until these have used it
        number = next(_NUMBERS)
        MEMORY[index].taken(number, storage.nbytes())
        weakref.finalize(self, MEMORY[index].blocks.pop, number)
        Block.live[storage._cdata] = self

    @classmethod
    def of(cls, value: torch.Tensor, index: int) -> Block:
        storage = value.untyped_storage()
        return cls.live.get(storage._cdata) or cls(storage, index)

    def written(self) -> None:
        now = current_stream()
        if now is not MAIN:
            self.writers.add(now)
            now.missing.add(self)

    def check(self) -> None:
        if self.writers - {current_stream()}:
            raise RuntimeError("toy: a tensor is used before the copy into it has ended")
        if current_stream() not in self.known_to:
            raise RuntimeError("toy: memory of another stream is used without record_stream")


class ToyTensor(torch.Tensor):
    """A tensor on the device: `held` is its CPU tensor, `block` the memory that it shares."""

    held: torch.Tensor
    block: Block

    @staticmethod
    def __new__(cls, held: torch.Tensor, index: int = 0) -> ToyTensor:
        assert held.device.type == "cpu" and type(held) is torch.Tensor
        made = torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=torch.device("toy", index),
        )
        made.held = held
        made.block = Block.of(held, index)
        return made

    def __repr__(self, **_: Any) -> str:
        return f"toy({self.held!r})"

    def __deepcopy__(self, memo: Any) -> ToyTensor:
        made = ToyTensor(self.held.clone(), self.device.index)
        made.requires_grad_(self.requires_grad)
        if getattr(self, "_is_param", False):
            made._is_param = True
        return made

    def untyped_storage(self) -> Any:
        return self.held.untyped_storage()

    def data_ptr(self) -> int:
        return self.held.data_ptr()  # to compare

    def numpy(self, **_: Any) -> Any:
        raise TypeError("toy: copy the tensor to the host first")

    def record_stream(self, stream: Stream) -> None:
        self.block.known_to.add(stream)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    @property
    def data(self) -> Any:
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, value)
        if isinstance(value, ToyTensor):
            self.held, self.block = value.held, value.block

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is ORIGINAL and not torch.is_grad_enabled():  # chosen by device before dispatch
            return _run(func, args, kwargs or {})
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is aten._to_copy.default:
            return _to_copy(*args, **kwargs)
        if func is aten.copy_.default:
            return _copy_(*args, **kwargs)
        if func is aten._local_scalar_dense.default:
            _log(args[0], False)
            return func(_held(args[0]))
        if func is aten.is_pinned.default:
            return False
        asked = kwargs.get("device")
        if asked is not None and torch.device(asked).type == "cpu":  # such as zeros_like
            return func(*_cpu(args), **_cpu(kwargs))
        return _run(
            func, args, {k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")}
        )


def _tensors(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    tree_map(lambda each: found.append(each) if isinstance(each, torch.Tensor) else None, value)
    return found


def _held(value: Any) -> Any:
    if isinstance(value, ToyTensor):
        value.block.check()
        return value.held
    return value


def _cpu(value: Any) -> Any:
    return tree_map(_held, value)


def _run(func: Any, args: Any, kwargs: Any) -> Any:
    """Run an operation on the CPU; its results are on the device of its arguments."""
    given = _tensors((args, kwargs))
    toys = [each for each in given if isinstance(each, ToyTensor)]
    indices = {each.device.index for each in toys}
    exempt = _tensors(args[1]) if func in INDEXING and isinstance(args[0], ToyTensor) else []
    strangers = [
        each
        for each in given
        if not isinstance(each, ToyTensor) and each.ndim and not any(each is e for e in exempt)
    ]
    if strangers or len(indices) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{' and '.join(sorted({str(e.device) for e in given}))}! (in {func})"
        )
    index = indices.pop()
    same = {id(each.held): each for each in toys}
    found = func(*_cpu(args), **_cpu(kwargs))

    def back(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        known = same.get(id(value))
        if known is None:
            made = ToyTensor(value, index)
            made.block.written()
            return made
        known.block.written()
        if known.shape != value.shape:
            torch.Tensor.data.__set__(known, ToyTensor(value, index))  # such as squeeze_
        return known

    return tree_map(back, found)


PINNED: weakref.WeakValueDictionary[int, torch.UntypedStorage] = weakref.WeakValueDictionary()


def is_pinned(value: torch.Tensor) -> bool:
    """Whether a tensor is in pinned host memory."""
    return value.device.type == "cpu" and value.untyped_storage()._cdata in PINNED


def _pin_memory(value: torch.Tensor, device: Any = None) -> torch.Tensor:
    made = value.clone()
    storage = made.untyped_storage()
    PINNED[storage._cdata] = storage
    return made


def _log(value: torch.Tensor, to_device: bool, pinned: bool = False) -> None:
    index = value.device.index if isinstance(value, ToyTensor) else 0
    MEMORY[index].transfers.append(
        Transfer(
            to_device,
            tuple(value.shape),
            value.dtype,
            value.numel() * value.itemsize,
            pinned,
            current_stream().name,
        )
    )


def _to_copy(value: torch.Tensor, **options: Any) -> torch.Tensor:
    device = torch.device(options.pop("device", None) or value.device)
    options.pop("pin_memory", None)
    options.pop("non_blocking", None)
    if device.type == "cpu":
        _log(value, False)
        return aten._to_copy.default(_held(value), **options)
    if device.type == "meta":
        return aten._to_copy.default(_held(value), device=device, **options)
    made = ToyTensor(aten._to_copy.default(_held(value), **options), device.index or 0)
    made.block.written()
    return made


def _copy_(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    to_device = isinstance(target, ToyTensor)
    if to_device != isinstance(source, ToyTensor):
        _log(target if to_device else source, to_device, is_pinned(source))
    _held(target).copy_(_held(source))
    if isinstance(target, ToyTensor):
        target.block.written()
    return target


class _Module(_DummyBackendModule):
    """`torch.toy`."""

    Stream = Stream
    stream = staticmethod(stream)
    current_stream = staticmethod(current_stream)

    def device_count(self) -> int:
        return len(MEMORY)

    def mem_get_info(self, device: Any = None) -> tuple[int, int]:
        memory = MEMORY[torch.device(device or "toy").index or 0]
        return memory.limit - memory.used, memory.limit

    def set_device(self, device: Any) -> None:
        _local.device = torch.device(device).index or 0

    def current_device(self) -> int:
        return getattr(_local, "device", 0)

    def empty_cache(self) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


class _Hook(_DummyPrivateUse1Hook):
    def is_pinned(self, data: Any) -> bool:
        return False


def _index(device: Any) -> int:
    return torch.device(device).index or 0


def _empty(size: Any, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return ToyTensor(torch.empty(size, dtype=dtype), _index(device))


def _empty_strided(
    size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    return ToyTensor(torch.empty_strided(size, stride, dtype=dtype), _index(device))


def _arange(
    start: Any, end: Any, step: Any = 1, *, dtype: Any = None, device: Any = None, **_: Any
) -> torch.Tensor:
    return ToyTensor(torch.arange(start, end, step, dtype=dtype), _index(device))


def _eye(n: int, m: int, *, dtype: Any = None, device: Any = None, **_: Any) -> torch.Tensor:
    return ToyTensor(torch.eye(n, m, dtype=dtype), _index(device))


def install() -> None:
    """Make `torch.device("toy")` known, for the rest of the process."""
    _setup_privateuseone_for_python_backend("toy", _Module(), _Hook(), _DummyDeviceGuard())
    library = torch.library.Library("aten", "IMPL")
    for name, function in {
        "empty.memory_format": _empty,
        "empty_strided": _empty_strided,
        "_copy_from": lambda source, target, non_blocking=False: _copy_(target, source),
        "eye": lambda n, **more: _eye(n, n, **more),
        "eye.m": _eye,
        "arange": lambda end, **more: _arange(0, end, **more),
        "arange.start": _arange,
        "arange.start_step": _arange,
    }.items():
        library.impl(name, function, "PrivateUse1")
    library.impl("_pin_memory", _pin_memory, "CPU")
    install.library = library  # type: ignore[attr-defined]
