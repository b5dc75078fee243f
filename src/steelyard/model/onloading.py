"""Holds modules in memory that compressed-tensors has offloaded.

An offloaded module reads its tensors anew at each access, so that a change in place is lost, and
its forward is wrapped. For the time that a block is worked on, its modules are ordinary ones.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["onloaded"]


@contextlib.contextmanager
def onloaded(module: Module, without: Module | None = None) -> Iterator[None]:
    """Hold the tensors of offloaded modules on the device that they compute on.

    without: a child whose modules stay offloaded
    """
    from compressed_tensors.offload import get_cache_init_kwargs, offload_module
    from compressed_tensors.offload.cache import OffloadCache
    from compressed_tensors.offload.module import remove_module_offload

    excluded = set() if without is None else set(without.modules())
    settings: dict[Module, dict[str, Any]] = {}
    try:
        for each in module.modules():
            if each not in excluded and isinstance(each._parameters, OffloadCache):
                settings[each] = get_cache_init_kwargs(each)
                remove_module_offload(each, onload_tensors=True)
                if getattr(each.forward, "__func__", None) is type(each).forward:
                    each.__dict__.pop("forward", None)  # not one of its own
        yield
    finally:
        for each, kwargs in settings.items():
            offload_module(each, **kwargs)
