"""The process group of `torchrun`, and its group for tensors of the CPU."""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import distributed as dist

from steelyard.distributed.device_channel import backend_of
from steelyard.distributed.local_device import group_backends

__all__ = ["gloo_group", "join_from_environment"]

_PATIENCE = timedelta(hours=2)  # longest wait for a rank that is alive

_beside: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # default group -> its gloo group


def join_from_environment() -> None:
    """Join the process group of `torchrun`, if it started this process and none is joined yet."""
    if not dist.is_available() or dist.is_initialized() or "TORCHELASTIC_RUN_ID" not in os.environ:
        return
    local, backend = int(os.environ.get("LOCAL_RANK", "0")), "gloo"
    if torch.accelerator.is_available():
        if local < torch.accelerator.device_count():  # else all may compute on the CPU
            torch.accelerator.set_device_index(local)
        kind = str(torch.accelerator.current_accelerator())
        own = backend_of(kind)  # such as nccl
        backend = backend if own is None else f"cpu:{backend},{kind}:{own}"
    dist.init_process_group(backend, timeout=_PATIENCE)


def gloo_group() -> Any:
    """Return a group that sends tensors of the CPU through gloo; every rank must call this.

    It is the default process group, or one beside it that is made once.
    """
    default = dist.group.WORLD
    if "gloo" in group_backends().values():
        return default
    if default not in _beside:
        _beside[default] = dist.new_group(backend="gloo")
    return _beside[default]
