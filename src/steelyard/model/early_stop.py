"""Ends a forward pass early, once the modules of interest have run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

__all__ = ["StopAfter", "StopForward"]


class StopForward(Exception):
    """Ends a forward pass whose remaining modules are not needed."""


class StopAfter:
    """Ends each pass through `layer` once all `modules` have been called.

    The first pass runs to its end, to check that every module is called exactly once; if not, all
    passes do.
    """

    def __init__(self, layer: Module, modules: Iterable[Module]) -> None:
        self.layer = layer
        self.calls = dict.fromkeys(modules, 0)
        self._once: bool | None = None
        self._pending: set[Module] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> StopAfter:
        self._handles = [m.register_forward_pre_hook(self._called) for m in self.calls]
        self._handles.append(self.layer.register_forward_hook(self._ended))
        return self

    def __exit__(self, *exc: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _called(self, module: Module, _args: Any) -> None:
        if self._once is None:
            self.calls[module] += 1
            return
        self._pending.discard(module)
        if self._once and not self._pending:
            self._pending = set(self.calls)
            raise StopForward

    def _ended(self, *_: Any) -> None:
        if self._once is None:
            self._once = all(count == 1 for count in self.calls.values())
        self._pending = set(self.calls)
