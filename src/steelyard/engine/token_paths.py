"""Finds the modules of a layer whose outputs reach no other token's output of the layer.

The output of `down_proj` at a token changes what the layer puts out at that token alone; that of
`k_proj` changes other tokens too. The gradient tells them apart: without a path it is exactly zero.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import Module

from steelyard.engine.parts import Part
from steelyard.model.batch_forward import first_sample
from steelyard.model.early_stop import StopForward
from steelyard.model.first_tokens import first_tokens
from steelyard.model.placeholders import first_tensor
from steelyard.model.precision import computing_in
from steelyard.model.stand_ins import standing_in

__all__ = ["TokenPaths"]

_TOKENS = 32  # of one sample
_SCALE = 1 / 8  # of what stands in for a product: large scores would let attention see one token


class TokenPaths:
    """Looks at one layer of each structure.

    notes: receives a sentence for each whose gradient is not known
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
        forward: runs a batch through the part; the beginning of its first sample is enough
        dtype:   the type to compute in; None for that of the model
        """
        paths = [[name[len(part.name) + 1 :] for name in names] for names in stages]
        structure = (type(part.root), tuple(map(tuple, paths)))
        if structure not in self._known:
            every = {path: part.root.get_submodule(path) for some in paths for path in some}
            with computing_in(part.root, dtype, without=every.values()):
                own = _own_token(part.root, every, first_sample(forward))
            self._known[structure] = None
            if own is not None:
                self._known[structure] = [all(own[path] for path in some) for some in paths]
            else:
                note = (
                    f"every token counts alike in each {type(part.root).__name__}: no gradient "
                    "tells which outputs reach other tokens"
                )
                if note not in self.notes:  # of a run that goes on
                    self.notes.append(note)
        return self._known[structure]


def _own_token(
    root: Module, modules: Mapping[str, Module], forward: Callable[[], Any]
) -> dict[str, bool] | None:
    """Return of each module whether its outputs stay with their token."""
    calls: list[Any] = []

    def called(_: Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls.append((args, dict(kwargs)))
        raise StopForward

    handle = root.register_forward_pre_hook(called, with_kwargs=True, prepend=True)
    try:
        with contextlib.suppress(StopForward):
            forward()
    finally:
        handle.remove()
    for call in (first_tokens(calls[0], _TOKENS), calls[0]):
        # A forward that needs all tokens may raise anything if some are cut off, and an operator
        # without a gradient too.
        with contextlib.suppress(Exception):
            if call is not None:
                return _without_gradient(root, modules, *call)
    return None


@torch.enable_grad()
def _without_gradient(
    root: Module, modules: Mapping[str, Module], args: Any, kwargs: Any
) -> dict[str, bool]:
    """Return of each module whether its outputs at even places have no gradient at odd ones."""
    added: dict[Module, torch.Tensor] = {}
    with standing_in({m: functools.partial(_repeated, added, m) for m in modules.values()}):
        output = first_tensor(root(*args, **kwargs))
    samples, length, _ = output.shape
    odd = output[:, 1::2].float()
    probe = torch.randn(odd.shape, generator=torch.Generator().manual_seed(0))
    loss = (odd * probe.to(odd.device)).sum()
    found = torch.autograd.grad(loss, list(added.values()), allow_unused=True)
    gradients = dict(zip(added, found, strict=True))  # an expert need not have been called

    def stays(gradient: torch.Tensor | None) -> bool:
        if gradient is None or gradient.numel() % (samples * length):
            return False
        return not bool(gradient.reshape(samples, length, -1)[:, ::2].any())

    return {name: stays(gradients.get(module)) for name, module in modules.items()}


def _repeated(added: dict[Module, torch.Tensor], module: Any, x: torch.Tensor) -> torch.Tensor:
    """Repeat the input of a module, so that nothing is multiplied and no weight is needed.

    added: receives what is added to the output: zeros that require a gradient
    """
    columns = torch.arange(module.out_features, device=x.device) % x.shape[-1]
    output = x[..., columns] * _SCALE
    added[module] = torch.zeros_like(output, requires_grad=True)
    return output + added[module]
