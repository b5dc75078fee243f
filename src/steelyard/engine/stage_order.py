"""Finds the order in which a layer calls its modules, and which of them share an input."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.nn import Module

from steelyard.model.batch_forward import with_first_part
from steelyard.model.precision import is_plain_linear
from steelyard.model.stand_ins import standing_in

__all__ = ["find_stages"]


def find_stages(
    modules: Mapping[str, Module],
    forward: Callable[[], Any],
    tokens: int,
    points: Mapping[str, Module] | None = None,
    dtype: torch.dtype | None = None,
) -> list[list[str]] | None:
    """Return the names of `modules` in the order of their calls, grouped by shared input.

    points: routing points of modules that are parts of experts

    Runs `forward` once, with modules that return zeros, so it computes next to nothing; a part of
    the batch, if the device runs out of memory.

    Returns None if the order may depend on the data: unless each module is a Linear that is called
    once, with all `tokens` of the batch. Also None if an input has another dtype than `dtype`: such
    a class casts to the dtype of a weight, which is itself cast only when its stage is solved.
    """
    if not all(map(is_plain_linear, modules.values())):
        return None
    find = functools.partial(_stages, modules, points or {}, dtype)
    return with_first_part(find, forward, tokens)


def _stages(
    modules: Mapping[str, Module],
    points: Mapping[str, Module],
    dtype: torch.dtype | None,
    forward: Callable[[], Any],
    tokens: int,
) -> list[list[str]] | None:
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

    hooks = [point.register_forward_pre_hook(called) for point in set(points.values())]
    try:
        with standing_in({module: stand_in(name, module) for name, module in modules.items()}):
            forward()
    finally:
        for hook in hooks:
            hook.remove()
    once = sorted(name for name, _ in calls) == sorted(modules)
    whole = (x.numel() == tokens * x.shape[-1] for name, x in calls if name not in points)
    if not once or not all(whole):
        return None
    if any(x.dtype != (dtype or x.dtype) for name, x in calls if name not in points):
        return None
    stages: dict[int, list[str]] = {}
    for name, x in calls:  # `calls` keeps the tensors alive, so ids are unique
        stages.setdefault(id(x), []).append(name)
    return list(stages.values())
