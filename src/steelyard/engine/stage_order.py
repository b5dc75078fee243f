"""Finds out in which order a layer calls its modules, and which of them with one tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Linear, Module

__all__ = ["find_stages"]


def find_stages(
    modules: Mapping[str, Module],
    forward: Callable[[], Any],
    tokens: int,
    points: Mapping[str, Module] | None = None,
    dtype: torch.dtype | None = None,
) -> list[list[str]] | None:
    """Return the names of `modules`, those with one input together, in the order of their calls.

    points: of modules that are parts of experts, what is called with the inputs of all at once

    `forward` is run once while the modules give zeros, so that next to nothing is computed.

    None where there are none that hold for all data: unless each module is a Linear that is called
    once, with all `tokens` of the batch, which of them are called may depend on the data. One that
    is called with another type than `dtype` has its weight looked at, which is cast only when the
    stage is solved.
    """
    if not all(_is_plain(module) for module in modules.values()):
        return None
    points = points or {}
    calls: list[tuple[str, Any]] = []

    def stand_in(name: str, module: Any) -> Callable[..., torch.Tensor]:
        def zeros(*args: Any) -> torch.Tensor:
            if name not in points:
                calls.append((name, args[0]))
            shape = (*args[0].shape[:-1], module.out_features)
            return torch.zeros(shape, dtype=args[0].dtype, device=args[0].device)

        return zeros

    def called(point: Module, args: tuple[Any, ...]) -> None:
        calls.extend((name, args[0]) for name in modules if points.get(name) is point)

    before = {name: module.__dict__.get("forward") for name, module in modules.items()}
    hooks = [point.register_forward_pre_hook(called) for point in set(points.values())]
    try:
        for name, module in modules.items():
            module.__dict__["forward"] = stand_in(name, module)
        forward()
    finally:
        for hook in hooks:
            hook.remove()
        for name, module in modules.items():
            del module.__dict__["forward"]
            if before[name] is not None:
                module.__dict__["forward"] = before[name]
    once = sorted(name for name, _ in calls) == sorted(modules)
    whole = (x.numel() == tokens * x.shape[-1] for name, x in calls if name not in points)
    if not once or not all(whole):
        return None
    if any(x.dtype != (dtype or x.dtype) for name, x in calls if name not in points):
        return None
    stages: dict[int, list[str]] = {}
    for name, x in calls:  # which keeps them alive, so that no two have the same id
        stages.setdefault(id(x), []).append(name)
    return list(stages.values())


def _is_plain(module: Module) -> bool:
    """Whether a module returns a product and nothing else, unlike the routers of some classes."""
    return isinstance(module, Linear) and type(module).forward is Linear.forward
