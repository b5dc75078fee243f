"""Second moments of what flows into modules, H = sum of x^T x, gathered by hooks.

Layers that are called with the same tensor (q, k and v; gate and up) share one: it is computed once
and held once. Which layers do is seen in the first pass and must not change after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import Module
from torch.utils.hooks import RemovableHandle

from steelyard.errors import CalibrationError
from steelyard.kernels.hessian import accumulate, symmetric
from steelyard.observers.padding import real_tokens

__all__ = ["Hessians"]


class _Moment:
    """One second moment, and how many tokens it was summed over."""

    def __init__(self, columns: int, device: torch.device) -> None:
        self.sum = torch.zeros(columns, columns, device=device)
        self.tokens = 0
        self.last: torch.Tensor | None = None  # what was added last


class Hessians:
    """Gathers while it is entered.

    modules: those to gather for, by name
    offload: keep the moments on the CPU, wherever the modules are
    """

    def __init__(self, modules: Mapping[str, Module], offload: bool = False) -> None:
        self.modules = dict(modules)
        self.offload = offload
        self._moments: dict[str, _Moment] = {}
        self._latest: _Moment | None = None
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Hessians:
        for name, module in self.modules.items():

            def hook(_module: Module, args: Any, name: str = name) -> None:
                self._see(name, args[0] if isinstance(args, tuple) else args)

            self._handles.append(module.register_forward_pre_hook(hook))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        for moment in self._moments.values():
            moment.last = None
        self._latest = None

    @torch.no_grad()
    def _see(self, name: str, x: torch.Tensor) -> None:
        moment = self._moments.get(name)
        if moment is None:
            latest = self._latest
            if latest is None or latest.last is not x:
                device = torch.device("cpu") if self.offload else x.device
                latest = _Moment(x.shape[-1], device)
            moment = self._moments[name] = latest
        if moment.last is x:  # a layer that shares it was here first
            return
        if moment.tokens and self._owner(moment) != name:
            raise CalibrationError(
                f"{name} was called with another tensor than {self._owner(moment)}, with which it "
                "shared its input before; their inputs cannot be told apart any more"
            )
        real = real_tokens(x, "input")
        accumulate(moment.sum, real.to(moment.sum.device))
        moment.tokens += real.numel() // real.shape[-1]
        moment.last = x
        self._latest = moment

    def _owner(self, moment: _Moment) -> str:
        return next(name for name, each in self._moments.items() if each is moment)

    def tokens(self, name: str) -> int:
        return self._moments[name].tokens if name in self._moments else 0

    def diagonal(self, name: str) -> torch.Tensor:
        """Return the sum of x^2 of each input channel."""
        return self._moments[name].sum.diagonal().clone()

    def hessian(self, name: str) -> torch.Tensor:
        """Return H of a module, (columns, columns) fp32; all zero if no token reached it."""
        moment = self._moments.get(name)
        if moment is not None:
            return symmetric(moment.sum)
        weight: Any = self.modules[name].weight
        return torch.zeros(weight.shape[1], weight.shape[1], device=weight.device)
