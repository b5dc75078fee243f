"""Weights under several schemes, rounded as the algorithm of a recipe rounds them, before its run.

An algorithm that rounds to nearest needs the weights alone, or E[x^2] of their inputs where the
recipe weighs columns. GPTQ needs the Hessians of the inputs. Both are those of the original model:
the samples run through each layer once more while it is in memory.

Weights that took a Hessian are kept, since a measurement of the whole model needs them again: in
memory, then in temporary files, in the type of the source, which a server decodes them to.
"""

from __future__ import annotations

import contextlib
import functools
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.algorithms.algorithm import Algorithm
from steelyard.algorithms.as_stored import rounded_weights, with_scheme
from steelyard.distributed import ThreadPool
from steelyard.model.activations import HiddenStates, Room, fetched
from steelyard.model.batch_state import Batch
from steelyard.model.layer_gradients import Trace
from steelyard.model.layerwise import LayerwiseModel, default_memory
from steelyard.model.placeholders import replaced
from steelyard.observers.hessians import Hessians

__all__ = ["RoundingAhead", "Schemes", "rounded_as"]

Schemes = Mapping[str, Sequence[QuantizationScheme]]
"""Module -> the schemes to score; modules that a server fuses have equally many."""
Seen = list[tuple[list[str], torch.Tensor]]
"""The modules that share an input, and that input."""


def rounded_as(
    schemes: Mapping[str, QuantizationScheme | None],
    modules: Mapping[str, Any],
    dtype: torch.dtype,
    squares: Mapping[str, tuple[torch.Tensor, int]] | None = None,
) -> dict[str, torch.Tensor]:
    """Return the weights of modules, rounded to nearest under a scheme, in fp32.

    dtype:   that the weights are stored in
    squares: the sum of x^2 of each column and the number of tokens, if columns are weighed
    """
    weights = {name: module.weight.data.to(dtype) for name, module in modules.items()}
    holders = {n: with_scheme(schemes[n], tuple(w.shape), dtype) for n, w in weights.items()}
    return rounded_weights(holders, weights, squares or {})


class RoundingAhead:
    """Rounds the modules of one layer at a time, while it is entered.

    algorithm: that quantizes in the recipe; None rounds to nearest
    weighs:    whether the recipe weighs columns by E[x^2]
    """

    def __init__(
        self,
        model: LayerwiseModel,
        schemes: Schemes,
        algorithm: Algorithm | None = None,
        weighs: bool = False,
    ) -> None:
        self.model = model
        self.schemes = schemes
        self.algorithm = algorithm
        self.dtype = model.source.dtype
        self.by_hessians = algorithm is not None and algorithm.rounds_by_hessians
        self.weighs = weighs and not self.by_hessians
        named = dict(model.source.model.named_modules())
        self.names = {named[name]: name for name in schemes}
        self._squares: dict[str, tuple[torch.Tensor, int]] = {}
        self._kept: dict[tuple[str, int], torch.Tensor] = {}
        nbytes = sum(
            len(each) * named[name].weight.numel() * self.dtype.itemsize
            for name, each in schemes.items()
        )
        room = default_memory() // 4
        self._held = HiddenStates(Room(0, room), nbytes)
        self.can_measure = not self.by_hessians or nbytes <= max(
            room, shutil.disk_usage(_folder()).free // 2
        )
        """Whether there is room for the weights that measurements need."""

    def __enter__(self) -> RoundingAhead:
        return self

    def __exit__(self, *exc: object) -> None:
        self._kept.clear()
        self._held.__exit__(*exc)

    def of_layer(
        self, root: Module, samples: Sequence[Trace], pool: ThreadPool
    ) -> dict[str, list[torch.Tensor]]:
        """Return the weights of a layer's modules under each of their schemes, in fp32."""
        modules: dict[str, Any] = {self.names[m]: m for m in root.modules() if m in self.names}
        if not modules:
            return {}
        hessians = self._observe(root, modules, samples, pool)
        found: dict[str, list[torch.Tensor]] = {name: [] for name in modules}
        for k in range(max(len(self.schemes[name]) for name in modules)):
            chosen = {n: self.schemes[n][k] for n in modules if k < len(self.schemes[n])}
            for name, weight in self._rounded(chosen, modules, hessians, pool).items():
                found[name].append(weight)
                if hessians is not None and self.can_measure:
                    self._kept[name, k] = self._held.put(weight.to(self.dtype))
        return found

    def under(
        self, schemes: Mapping[str, QuantizationScheme | None], modules: Mapping[str, Any]
    ) -> dict[str, torch.Tensor]:
        """Return the weights of modules, each under a scheme, once `of_layer` has seen them."""
        found, left = {}, {}
        for name, module in modules.items():
            known = self.schemes.get(name, ())
            k = next((k for k, each in enumerate(known) if each == schemes[name]), None)
            if k is not None and (name, k) in self._kept:
                found[name] = fetched(self._kept[name, k]).float()
            else:
                left[name] = module
        return found | rounded_as(schemes, left, self.dtype, self._squares)

    def _rounded(
        self,
        chosen: Mapping[str, QuantizationScheme],
        modules: Mapping[str, Any],
        hessians: Hessians | None,
        pool: ThreadPool,
    ) -> dict[str, torch.Tensor]:
        some = {name: modules[name] for name in chosen}
        if hessians is None or self.algorithm is None:
            return rounded_as(chosen, some, self.dtype, self._squares)
        weights = {name: module.weight.data.to(self.dtype) for name, module in some.items()}
        holders = {
            n: with_scheme(chosen[n], tuple(w.shape), self.dtype) for n, w in weights.items()
        }
        return self.algorithm.round_ahead(holders, weights, hessians, pool)

    @torch.no_grad()
    def _observe(
        self,
        root: Module,
        modules: Mapping[str, Any],
        samples: Sequence[Trace],
        pool: ThreadPool,
    ) -> Hessians | None:
        """Run the samples through a layer for the statistics that its rounding needs."""
        if not self.by_hessians and not self.weighs:
            return None
        index = list(self.model.sequence.modules).index(root)
        hessians = Hessians(modules, pool=pool) if self.by_hessians else None
        local = threading.local()

        def note(module: Module, args: tuple[torch.Tensor, ...]) -> None:
            name, x = self.names[module], args[0]
            if local.seen and local.seen[-1][1] is x:
                local.seen[-1][0].append(name)
            else:
                local.seen.append(([name], x))

        def run(sample: Trace) -> Seen:
            local.seen = []
            call = sample.calls[index]
            outputs = {layer: replaced(sample.outputs[layer], fetched) for layer in call.layers}
            with torch.no_grad():
                self.model.sequence.run(index, Batch(sample.inputs, outputs, calls={index: call}))
            seen: Seen = local.seen
            return seen

        calls: list[tuple[int, Callable[[], Seen]]] = [
            (i, functools.partial(run, sample))
            for i, sample in enumerate(samples)
            if index in sample.calls
        ]
        with contextlib.ExitStack() as hooks:
            for module in modules.values():
                hooks.callback(module.register_forward_pre_hook(note).remove)
            with contextlib.closing(pool.begin(calls)) as found:
                for seen in found:
                    for names, x in seen:
                        self._add(names, x, hessians)
        if hessians is not None:
            hessians.close()
            hessians.shrink({})
            hessians.prepare(modules, 0.0)
        return hessians

    def _add(self, names: Sequence[str], x: torch.Tensor, hessians: Hessians | None) -> None:
        if hessians is not None:
            hessians.see(names, x)
            hessians.flush()
            return
        rows = x.reshape(-1, x.shape[-1])
        more = rows.double().square().sum(0)
        for name in names:
            total, tokens = self._squares.get(name, (torch.zeros_like(more), 0))
            self._squares[name] = (total + more, tokens + len(rows))


def _folder() -> str:
    return tempfile.gettempdir()
