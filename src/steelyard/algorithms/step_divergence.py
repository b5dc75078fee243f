"""The KL divergence of a changed model, such as a rotated one, rounded as a recipe would round it.

The samples run through the layers of the changed model, one in memory at a time, with inputs and
weights rounded under the schemes of the recipe. The modules after the layers are not rounded.

An algorithm that makes up for rounding errors, such as GPTQ, is not run: its weights stay as they
are, and only the inputs of those modules are rounded.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.algorithms.assigned_schemes import round_input
from steelyard.algorithms.model_pair import divergence
from steelyard.algorithms.rounding_ahead import rounded_as
from steelyard.distributed import ThreadPool
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory

__all__ = ["StepDivergence"]

Advance = Callable[[float], None]
Squares = dict[str, tuple[torch.Tensor, int]]


class StepDivergence:
    """Measures changed models on the same samples, while it is entered.

    model:   the original
    rows:    samples of (1, tokens)
    schemes: module -> its scheme
    nearest: modules whose weights are rounded to nearest
    weighs:  whether columns are weighed by E[x^2], which every other sample gives
    """

    def __init__(
        self,
        model: LayerwiseModel,
        rows: Sequence[Mapping[str, torch.Tensor]],
        pool: ThreadPool,
        schemes: Mapping[str, QuantizationScheme],
        nearest: frozenset[str],
        weighs: bool,
    ) -> None:
        self.model = model
        self.pool = pool
        self.schemes = schemes
        self.nearest = nearest
        self.weighs = weighs and bool(nearest)
        self.samples = [Trace(row) for row in rows]
        tokens = sum(sample.tokens for sample in self.samples)
        self._nbytes = tokens * model.hidden_size * DTYPE.itemsize
        self._held = self._states()

    def __enter__(self) -> StepDivergence:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.__exit__(*exc)

    @property
    def passes(self) -> float:
        """The cost of one measurement, in passes of the samples."""
        return 1.5 if self.weighs else 1.0

    def start(self, advance: Advance) -> None:
        """Run the original."""
        LayerGradients(self.model, self.pool).forward(self.samples, self._held, False, advance)

    def divergences(self, changed: LayerwiseModel, advance: Advance) -> list[float]:
        """Return KL(original || changed and rounded) of each sample, the mean over its tokens."""
        names = {module: name for name, module in changed.source.model.named_modules()}
        squares = self._squares(changed, names, advance) if self.weighs else {}
        after = [Trace(sample.inputs) for sample in self.samples]
        rounding = functools.partial(self._rounded, changed.source.dtype, names, squares)
        with self._states() as held:
            LayerGradients(changed, self.pool, rounding).forward(after, held, False, advance)
            with self.model.head(), changed.head():
                calls = [
                    functools.partial(divergence, self.model, before, changed, now)
                    for before, now in zip(self.samples, after, strict=True)
                ]
                return self.pool.do(enumerate(calls))

    def _states(self) -> HiddenStates:
        return HiddenStates(Room(0, default_memory() // 4), self._nbytes)

    @contextlib.contextmanager
    def _rounded(
        self,
        dtype: torch.dtype,
        names: Mapping[Module, str],
        squares: Squares,
        root: Module,
        without: Sequence[Module],
    ) -> Iterator[list[Wanted]]:
        """Hold the rounded weights of a layer in place of its own, and round its inputs."""
        modules = self._within(root, names)
        weighed = {name: module for name, module in modules.items() if name in self.nearest}
        with contextlib.ExitStack() as undo:
            for name, weight in rounded_as(self.schemes, weighed, dtype, squares).items():
                module = modules[name]
                undo.callback(setattr, module.weight, "data", module.weight.data)
                module.weight.data = weight
            for name, module in modules.items():
                if self.schemes[name].input_activations is not None:
                    hook = functools.partial(round_input, self.schemes[name])
                    undo.callback(module.register_forward_pre_hook(hook).remove)
            yield []

    def _within(self, root: Module, names: Mapping[Module, str]) -> dict[str, Any]:
        found = {names[module]: module for module in root.modules()}
        return {name: module for name, module in found.items() if name in self.schemes}

    # -- importance ---------------------------------------------------------------------------

    def _squares(
        self, changed: LayerwiseModel, names: Mapping[Module, str], advance: Advance
    ) -> Squares:
        """Return sums of x^2 of each column and numbers of tokens, of the changed model."""
        rows = [Trace(sample.inputs) for sample in self.samples[::2]]
        seen: dict[str, list[tuple[torch.Tensor, int]]] = {}
        watching = functools.partial(self._watched, names, seen)
        with self._states() as held:
            LayerGradients(changed, self.pool, watching).forward(
                rows, held, False, lambda share: advance(share / 2)
            )
        return {
            # sorted, so that the order in which threads come does not change the sum
            name: (torch.stack([s for s, _ in each]).sort(0).values.sum(0), sum(n for _, n in each))
            for name, each in seen.items()
        }

    @contextlib.contextmanager
    def _watched(
        self,
        names: Mapping[Module, str],
        seen: dict[str, list[tuple[torch.Tensor, int]]],
        root: Module,
        without: Sequence[Module],
    ) -> Iterator[list[Wanted]]:
        def note(name: str, _: Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0].reshape(-1, args[0].shape[-1])
            seen[name].append((x.double().square().sum(0), len(x)))

        with contextlib.ExitStack() as hooks:
            for name, module in self._within(root, names).items():
                if name in self.nearest:
                    seen[name] = []
                    hook = functools.partial(note, name)
                    hooks.callback(module.register_forward_pre_hook(hook).remove)
            yield []
            for name in [name for name, each in seen.items() if not each]:
                del seen[name]
