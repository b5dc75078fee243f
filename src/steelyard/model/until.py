"""A forward pass that ends when what comes after is not needed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch.nn import Module
from torch.utils.hooks import RemovableHandle

__all__ = ["Enough", "Until"]


class Enough(Exception):
    """Ends a forward pass whose rest is not needed."""


class Until:
    """Ends a pass through a layer once all of its `modules` were called: the rest is not needed.

    The first pass runs to its end and shows whether each is called just once, as a condition.
    """

    def __init__(self, layer: Module, modules: Iterable[Module]) -> None:
        self.layer = layer
        self.calls = dict.fromkeys(modules, 0)
        self._once: bool | None = None
        self._left: set[Module] = set()
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> Until:
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
        self._left.discard(module)
        if self._once and not self._left:
            self._left = set(self.calls)
            raise Enough

    def _ended(self, *_: Any) -> None:
        if self._once is None:
            self._once = all(count == 1 for count in self.calls.values())
        self._left = set(self.calls)
