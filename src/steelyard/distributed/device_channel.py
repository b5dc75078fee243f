"""Tensors between ranks with an accelerator each, from device to device: through NCCL or its like.

Only bytes of known size travel here. The ranks agree on types and shapes beforehand, over gloo,
which carries everything else. So a rank that is late or gone is noticed there, where nothing hangs.
"""

from __future__ import annotations

import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import distributed as dist

from steelyard.distributed.local_device import group_backends, local_index
from steelyard.errors import RanksError

__all__ = ["DeviceChannel", "backend_of"]

_NONE = -1  # the number of a rank without a device

Do = Callable[[Callable[[], Any]], None]
"""Starts an exchange, and waits until it completes or a rank fails."""


def backend_of(kind: str) -> str | None:
    """Return torch's own backend for a kind of device, such as nccl; None if there is none."""
    try:
        found = dist.get_default_backend_for_device(kind)
    except ValueError:  # none is registered
        return None
    return found if found != dist.Backend.GLOO and dist.is_backend_available(found) else None


@dataclass(frozen=True)
class DeviceChannel:
    """The way between the devices of all ranks.

    device:  this rank's
    backend: of the process group, for that kind of device
    """

    device: torch.device
    backend: str

    @classmethod
    def open(cls, numbers: Callable[[int], list[int]]) -> DeviceChannel | None:
        """Return the way between devices; every rank must call this.

        None if the default process group has no backend for them, or a rank has no device of its
        own: tensors then go through host memory.

        numbers: exchanges a number of each rank
        """
        if set(group_backends().values()) == {dist.Backend.GLOO}:
            return None
        mine = _own_device()
        found = numbers(_NONE if mine is None else _identity(mine.device))
        return mine if _NONE not in found and len(set(found)) == len(found) else None

    def broadcast(self, tensors: Iterable[torch.Tensor], source: int, do: Do) -> None:
        """Send tensors of `source` to all ranks, each into a tensor of the same size."""
        for tensor in tensors:
            do(partial(dist.broadcast, _bytes(tensor), source, async_op=True))

    def send(self, tensors: Iterable[torch.Tensor], target: int, do: Do) -> None:
        for tensor in tensors:
            do(partial(dist.isend, _bytes(tensor), target))

    def receive(self, tensors: Iterable[torch.Tensor], source: int, do: Do) -> None:
        for tensor in tensors:
            do(partial(dist.irecv, _bytes(tensor), source))

    def empty(self, described: Sequence[tuple[torch.dtype, Sequence[int]]]) -> list[torch.Tensor]:
        """Return tensors to receive into, of the given types and shapes."""
        return [torch.empty(shape, dtype=dtype, device=self.device) for dtype, shape in described]


def _own_device() -> DeviceChannel | None:
    """Return this rank's end of the channel; None if it has none."""
    if not torch.accelerator.is_available():
        return None
    accelerator = torch.accelerator.current_accelerator()
    backend = None if accelerator is None else group_backends().get(accelerator.type)
    if accelerator is None or backend is None or backend == dist.Backend.GLOO:
        return None
    try:
        return DeviceChannel(torch.device(accelerator.type, local_index()), backend)
    except RanksError:  # more ranks than devices, so all may compute on the CPU
        return None


def _identity(device: torch.device) -> int:
    """Return a number of the device that others do not have; ranks may see theirs as index 0."""
    properties = getattr(torch.get_device_module(device), "get_device_properties", None)
    known = None if properties is None else getattr(properties(device), "uuid", None)
    name = f"{socket.gethostname()}/{device.index if known is None else known}"
    return zlib.crc32(name.encode())


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return a contiguous tensor as (n,) uint8: backends lack some of the stored types."""
    return tensor.view(-1).view(torch.uint8)
