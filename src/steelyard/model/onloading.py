"""Holds modules in memory that compressed-tensors or accelerate has offloaded.

An offloaded module reads its tensors anew at each access, so that a change in place is lost, and
its forward is wrapped. For the time that a block is worked on, its modules are ordinary ones.
What accelerate has offloaded, compressed-tensors takes over first: to the same devices and files.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch.nn import Module

__all__ = ["onloaded", "take_over"]


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


def take_over(model: Module) -> None:
    """Let compressed-tensors offload what accelerate has offloaded, as with `device_map`."""
    hooks = [hook for m in model.modules() if (hook := getattr(m, "_hf_hook", None)) is not None]
    if not any(getattr(hook, "offload", False) for hook in hooks):
        return
    from accelerate.utils import OffloadedWeightsLoader
    from compressed_tensors.offload.convert import from_accelerate

    for hook in hooks:
        weights: Any = getattr(hook, "weights_map", None)
        if isinstance(getattr(weights, "dataset", None), dict):  # of accelerate's `cpu_offload`
            weights.dataset = OffloadedWeightsLoader(state_dict=weights.dataset)
    from_accelerate(model)
