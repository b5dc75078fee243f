"""A process group for the toy device: what NCCL is for CUDA, with gloo underneath.

torch has one process group per process that is written in Python, so it carries tensors of the CPU
too. Every tensor that it carries from device to device is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import distributed as dist
from toy_device import ToyTensor

NAME = "toycarrier"
CARRIED: list[int] = []
"""Bytes of each tensor that went from or to the device."""


class ToyCarrier(dist.ProcessGroup):
    """Sends tensors of the CPU and of the toy device; refuses a message with both."""

    def __init__(self, store: Any, rank: int, size: int, timeout: Any) -> None:
        super().__init__(rank, size)
        self._gloo = dist.ProcessGroup(store, rank, size)
        backend = dist.ProcessGroupGloo(store, rank, size, timeout)
        kind = dist.ProcessGroup.BackendType.GLOO
        self._gloo._register_backend(torch.device("cpu"), kind, backend)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Any:
        return self._gloo.broadcast(_carried(tensors), options)

    def allgather(self, outputs: Any, inputs: list[torch.Tensor], options: Any) -> Any:
        return self._gloo.allgather([_carried(each) for each in outputs], _carried(inputs), options)

    def all_to_all_single(self, output: Any, given: Any, into: Any, out: Any, options: Any) -> Any:
        return self._gloo.all_to_all_single(*_carried([output, given]), into, out, options)

    def send(self, tensors: list[torch.Tensor], target: int, tag: int) -> Any:
        return _Ended(self._gloo.send(_carried(tensors), target, tag))

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> Any:
        return _Ended(self._gloo.recv(_carried(tensors), source, tag))

    def getBackendName(self) -> str:
        return NAME


class _Ended:
    """A tensor that was sent or received; gloo ends that only while somebody waits."""

    def __init__(self, work: Any) -> None:
        work.wait()

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: Any = None) -> bool:
        return True


def _carried(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Return the memory to send from or receive into."""
    kinds = {type(each) for each in tensors}
    assert len(kinds) == 1, "toy: a message has tensors of two devices"
    if kinds == {ToyTensor}:
        CARRIED.extend(each.numel() * each.itemsize for each in tensors)
    return [each.held if isinstance(each, ToyTensor) else each for each in tensors]


def register() -> None:
    """Make this the backend of the toy device; call after `toy_device.install`."""
    dist.Backend.register_backend(NAME, ToyCarrier, devices=["toy"])
