"""The accelerator of a rank: under `torchrun`, the one of its LOCAL_RANK."""

from __future__ import annotations

import os

import torch
from torch import distributed as dist

from steelyard.errors import RanksError

__all__ = ["group_backends", "group_device", "local_count", "local_index"]


def local_index() -> int:
    """Return the index of this rank's accelerator; torch's current one if there are no ranks."""
    given = os.environ.get("LOCAL_RANK", "")
    joined = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
    if not given.isdecimal() or not (joined or "TORCHELASTIC_RUN_ID" in os.environ):
        return torch.accelerator.current_device_index()
    count = torch.accelerator.device_count()
    if int(given) >= count:
        raise RanksError(
            f"LOCAL_RANK is {given}, but torch sees {count} accelerators: start as many ranks as "
            "there are, or all on the CPU with device='cpu'"
        )
    return int(given)


def local_count() -> int:
    """Return the number of ranks that share the memory of this machine."""
    if not (dist.is_available() and dist.is_initialized()):
        return 1
    given = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(given) if given.isdecimal() and int(given) else dist.get_world_size()


def group_backends() -> dict[str, str]:
    """Return the backend of each kind of device in the default process group.

    Such as {"cpu": "gloo", "cuda": "nccl"}.
    """
    found: dict[str, str] = {}
    for pair in str(dist.get_backend_config()).split(","):
        kind, _, backend = pair.partition(":")
        found[kind] = backend
    return found


def group_device() -> torch.device:
    """Return a device whose tensors the default process group sends; the CPU if it does."""
    kinds = list(group_backends())
    return torch.device("cpu") if "cpu" in kinds else torch.device(kinds[0], local_index())
