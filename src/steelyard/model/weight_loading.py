"""Brings the weights of one module at a time from files to the device, and frees them.

On an accelerator, a thread reads the module that comes next while this one computes: from the files
to pinned memory and, if it fits, on to the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch.nn import Embedding, Module, Parameter

from steelyard.model.freed_memory import return_memory
from steelyard.model.placement import CPU, Placement, free_bytes
from steelyard.model.stacks import Layer

__all__ = ["WeightLoader"]

Read = Callable[[str, Parameter | None, bool], torch.Tensor | None]
Wanted = list[tuple[Module, str, str]]
"""Module, leaf, and the whole name of a parameter."""

_ROOM = 4  # blocks that must fit into the free memory of the device, to bring one ahead


class WeightLoader:
    """Holds the weights of a module on the device.

    read:      returns a parameter from the files, by its name in the model; None if they lack it;
               the last argument tells that few rows of it may be used
    placement: the device
    """

    def __init__(self, read: Read, placement: Placement) -> None:
        self.read = read
        self.placement = placement
        self._next: dict[Module, Layer] = {}
        self._ahead: dict[str, Future[torch.Tensor | None]] = {}

    def in_order(self, layers: Sequence[Layer]) -> None:
        """Declare the order in which layers will be loaded."""
        self._next = dict(zip([each.module for each in layers], layers[1:], strict=False))

    @contextlib.contextmanager
    def loaded(
        self, module: Module, prefix: str, excluded: Collection[Module], skip: Collection[str]
    ) -> Iterator[None]:
        """Hold the weights and buffers of a module on the device, then free the weights.

        excluded, skip: modules within it that are not loaded, and the names of such
        """
        filled: Wanted = []
        with _placed(module, excluded, self.placement):
            try:
                with self._reading(module) as ahead:
                    for parent, leaf, name in _missing(module, prefix, excluded, skip):
                        value = self._take(name, parent)
                        if value is not None:
                            parent._parameters[leaf] = Parameter(value, requires_grad=False)
                            filled.append((parent, leaf, name))
                    ahead()
                    yield
            finally:
                for parent, leaf, _ in filled:
                    held = parent._parameters[leaf]
                    assert held is not None
                    parent._parameters[leaf] = Parameter(held.data.to("meta"), requires_grad=False)
                if filled:
                    return_memory()

    def _take(self, name: str, parent: Module) -> torch.Tensor | None:
        """Return a parameter on the device: as it was read ahead, or from the files."""
        reading = self._ahead.pop(name, None)
        if reading is None:
            looked_up = isinstance(parent, Embedding) and self.placement.is_host
            value = self.read(name, parent._parameters[name.rpartition(".")[2]], looked_up)
        else:
            value = reading.result()
            if value is not None and value.device == self.placement.device:
                return self.placement.arrived(value)
        return None if value is None else self.placement.bring(value)

    @contextlib.contextmanager
    def _reading(self, module: Module) -> Iterator[Callable[[], None]]:
        """Yield a function that starts to read the next module, in a thread that ends on exit."""
        after = self._next.get(module)
        if self.placement.is_host or after is None:
            yield lambda: None
            return
        wanted = list(_missing(after.module, after.name, (), ()))
        thread = ThreadPoolExecutor(1)

        def begin() -> None:
            self._ahead.clear()
            sizes = (p.nbytes for m, leaf, _ in wanted if (p := m._parameters[leaf]) is not None)
            fits = _ROOM * sum(sizes) <= free_bytes(self.placement.device)
            for parent, leaf, name in wanted:
                parameter = parent._parameters[leaf]
                self._ahead[name] = thread.submit(self._read_ahead, name, parameter, fits)

        try:
            yield begin
        except BaseException:
            thread.shutdown(cancel_futures=True)
            self._ahead.clear()
            raise
        thread.shutdown()

    def _read_ahead(
        self, name: str, parameter: Parameter | None, fits: bool
    ) -> torch.Tensor | None:
        value = self.read(name, parameter, False)
        if value is None:
            return None
        return self.placement.bring_ahead(value) if fits else value


def _missing(
    module: Module, prefix: str, excluded: Collection[Module], skip: Collection[str]
) -> Iterator[tuple[Module, str, str]]:
    """Yield the parameters on the meta device."""
    for name, parent in module.named_modules():
        path = f"{prefix}.{name}".strip(".")
        if parent in excluded or path in skip:
            continue
        for leaf, parameter in list(parent._parameters.items()):
            if parameter is not None and parameter.device.type == "meta":
                yield parent, leaf, f"{path}.{leaf}".strip(".")


@contextlib.contextmanager
def _placed(module: Module, excluded: Collection[Module], placement: Placement) -> Iterator[None]:
    """Hold the tensors that no file has on the device: rotary frequencies, random parameters."""
    if placement.is_host:
        yield
        return
    brought: list[tuple[dict[str, torch.Tensor | None], str, torch.Tensor, torch.Tensor]] = []
    try:
        for parent in module.modules():
            if parent in excluded:
                continue
            for tensors in (parent._buffers, parent._parameters):
                for leaf, value in list(tensors.items()):
                    if value is not None and value.device == CPU:
                        there = placement.bring(value)
                        tensors[leaf] = there  # type: ignore[assignment]
                        brought.append((tensors, leaf, value, there))  # type: ignore[arg-type]
        yield
    finally:
        for tensors, leaf, value, there in brought:
            now = tensors[leaf]  # a forward may have replaced it, such as longer frequencies
            assert now is not None
            tensors[leaf] = value if now is there else now.to(CPU)
