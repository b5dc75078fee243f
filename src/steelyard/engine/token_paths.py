"""Finds the modules of a layer whose outputs reach no other token's output of the layer.

The output of `down_proj` at a token changes what the layer puts out at that token alone; that of
`k_proj` changes other tokens too. The gradient tells them apart: without a path it is exactly zero.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn import Module

from steelyard.engine.parts import Part
from steelyard.model.batch_forward import first_sample
from steelyard.model.placeholders import first_tensor
from steelyard.model.precision import computing_in

__all__ = ["TokenPaths"]


class TokenPaths:
    """Looks at one layer of each structure.

    notes: receives a sentence for each that has no gradient
    """

    def __init__(self, notes: list[str]) -> None:
        self.notes = notes
        self._known: dict[Any, list[bool] | None] = {}

    def stay(
        self,
        part: Part,
        stages: Sequence[Sequence[str]],
        forward: Callable[[], Any],
        dtype: torch.dtype | None,
    ) -> list[bool] | None:
        """Return whether the outputs of each stage's modules stay with their token.

        None if gradients cannot tell.

        stages:  names of modules in the model
        forward: runs a batch through the part; its first sample is enough
        dtype:   the type to compute in; None for that of the model
        """
        paths = [[name[len(part.name) + 1 :] for name in names] for names in stages]
        structure = (type(part.root), tuple(map(tuple, paths)))
        if structure not in self._known:
            self._known[structure] = None
            modules = [[part.root.get_submodule(path) for path in some] for some in paths]
            # an operator may have no gradient, and the device no room for it
            with contextlib.suppress(RuntimeError), computing_in(part.root, dtype):
                self._known[structure] = _stay(modules, first_sample(forward))
            if self._known[structure] is None:
                self.notes.append(
                    f"{part.name}: every token counts alike, as in layers like it: no gradient "
                    "tells which outputs reach other tokens"
                )
        return self._known[structure]


@torch.enable_grad()
def _stay(stages: Sequence[Sequence[Module]], forward: Callable[[], Any]) -> list[bool] | None:
    added: dict[Module, torch.Tensor] = {}

    def add(module: Module, _args: Any, output: torch.Tensor) -> torch.Tensor:
        added[module] = torch.zeros_like(output, requires_grad=True)
        return output + added[module]

    with contextlib.ExitStack() as hooks:
        for modules in stages:
            for module in modules:
                hooks.callback(module.register_forward_hook(add).remove)
        output = first_tensor(forward())
    if output.ndim != 3 or not output.requires_grad:
        return None
    samples, length = output.shape[:2]
    odd = output[:, 1::2].float()
    probe = torch.randn(odd.shape, generator=torch.Generator().manual_seed(0))
    loss = (odd * probe.to(odd.device)).sum()
    gradients = dict(
        zip(added, torch.autograd.grad(loss, list(added.values()), allow_unused=True), strict=True)
    )

    def stays(module: Module) -> bool:
        found = gradients.get(module)
        if found is None or found.numel() % (samples * length):
            return False
        return not bool(found.reshape(samples, length, -1)[:, ::2].any())

    return [all(map(stays, modules)) for modules in stages]
