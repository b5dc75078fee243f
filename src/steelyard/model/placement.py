"""Where tensors live; no other module names a kind of device.

A model in a folder is computed on an accelerator, if there is one: a block's weights go from the
files to the device, are worked on, and leave. A loaded module stays where it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import psutil
import torch
from torch.nn import Module

from steelyard.distributed import local_index
from steelyard.errors import PlanError

__all__ = ["CPU", "Placement", "free_bytes", "holding_budget", "module_device", "placement_of"]

CPU = torch.device("cpu")
_WITHOUT_FP64 = ("mps",)  # exact sums and histograms are fp64


class Placement:
    """The device that blocks are computed on, and the way there.

    device: with an index, unless it is the CPU
    """

    def __init__(self, device: torch.device = CPU) -> None:
        self.device = device
        self._side: Any = None  # the stream that reads ahead

    @property
    def is_host(self) -> bool:
        """Whether blocks are computed in the memory that files are read into."""
        return self.device.type == CPU.type

    def bring(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device."""
        return value if value.device == self.device else value.to(self.device)

    def bring_all(self, values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return tensors by name on the device."""
        return {name: self.bring(value) for name, value in values.items()}

    def bring_ahead(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device, copied while it computes; call `arrived` before use."""
        with self._side_stream():
            return value.pin_memory().to(self.device, non_blocking=True)

    def arrived(self, value: torch.Tensor) -> torch.Tensor:
        """Return a tensor of `bring_ahead` that the current stream may use."""
        if self._side is not None:
            current = torch.get_device_module(self.device).current_stream(self.device)
            current.wait_stream(self._side)
            value.record_stream(current)  # else its memory is reused once this stream's work is
        return value

    @contextlib.contextmanager
    def _side_stream(self) -> Iterator[None]:
        module = torch.get_device_module(self.device)
        if not hasattr(module, "Stream"):  # all work on the device is in one order
            yield
            return
        if self._side is None:
            self._side = module.Stream(self.device)
        with module.stream(self._side):
            yield


def placement_of(asked: Any, model: Any) -> Placement:
    """Return where a model is computed.

    asked: auto, cpu, or an accelerator such as cuda, cuda:1 or xpu
    model: a loaded module stays where it is; for a folder or a hub name, auto takes torch's current
           accelerator, or the CPU if there is none
    """
    known = _device(asked)
    if not isinstance(model, Module):
        device = known or _accelerator() or CPU
        if device.index is not None and device.index != torch.accelerator.current_device_index():
            torch.accelerator.set_device_index(device.index)  # compiled kernels start there
        return Placement(device)
    own = module_device(model)
    if known is not None and known != own:
        raise PlanError(
            f"device={str(asked)!r} does not move a loaded module, which is on {own}; call "
            f"model.to({str(asked)!r}) first, or pass its folder"
        )
    return Placement(own)


def module_device(model: Module) -> torch.device:
    """Return the device of the weights in memory; the CPU if none is."""
    devices: Iterator[torch.device] = (p.device for p in model.parameters())
    return next((d for d in devices if d.type != "meta"), CPU)


def free_bytes(device: torch.device) -> int:
    """Return the free memory of a device, or of the machine."""
    info = getattr(torch.get_device_module(device), "mem_get_info", None)
    if device.type == CPU.type or info is None:
        return int(psutil.virtual_memory().available)
    return int(info(device)[0])


def holding_budget(device: torch.device) -> int:
    """Return how many bytes waiting batches may hold: a quarter of the free memory."""
    return free_bytes(device) // 4


def _device(asked: Any) -> torch.device | None:
    """Return the device that an option names; None for auto."""
    if asked == "auto":
        return None
    try:
        device = torch.device(asked)
    except (RuntimeError, TypeError, ValueError) as error:
        raise PlanError(f"device={asked!r} is not known: {_choices()}") from error
    if device.type == CPU.type:
        return CPU
    accelerator = _accelerator(with_fp64=False)
    if accelerator is None or accelerator.type != device.type:
        raise PlanError(f"device={str(asked)!r}: torch {torch.__version__} sees none; {_choices()}")
    count = torch.accelerator.device_count()
    if device.index is not None and device.index >= count:
        raise PlanError(f"device={str(asked)!r}: torch sees {count}, from {device.type}:0 on")
    return accelerator if device.index is None else device


def _choices() -> str:
    found = _accelerator(with_fp64=False)
    return "use auto or cpu" if found is None else f"use auto, cpu or {found.type}"


def _accelerator(with_fp64: bool = True) -> torch.device | None:
    """Return the accelerator of this process with its index; None if there is none."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if found is None or (with_fp64 and found.type in _WITHOUT_FP64):
        return None
    return torch.device(found.type, local_index())
