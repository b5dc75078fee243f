"""The KL divergence of a model whose modules have given schemes, before anything is quantized.

Weights are rounded as each layer is loaded, and the samples run through the layers. The modules
after the layers are the original's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationScheme
from torch.nn import Module

from steelyard.algorithms.model_pair import divergence
from steelyard.algorithms.rounding_ahead import RoundingAhead
from steelyard.algorithms.scheme_scores import input_rounding
from steelyard.distributed import ThreadPool
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted
from steelyard.model.layerwise import DTYPE, LayerwiseModel, default_memory

__all__ = ["AssignedSchemes", "Assignment", "round_input"]

Assignment = Mapping[str, QuantizationScheme | None]
"""Module -> its scheme; None for unquantized."""


class AssignedSchemes:
    """Measures assignments on the same samples, while it is entered.

    rows:     samples of (1, tokens)
    rounding: of the weights; to nearest by default
    """

    def __init__(
        self,
        model: LayerwiseModel,
        rows: Sequence[Mapping[str, torch.Tensor]],
        pool: ThreadPool,
        rounding: RoundingAhead | None = None,
    ) -> None:
        self.model = model
        self.rounding = RoundingAhead(model, {}) if rounding is None else rounding
        self.pool = pool
        self.samples = [Trace(row) for row in rows]
        self.names = {module: name for name, module in model.source.model.named_modules()}
        tokens = sum(sample.tokens for sample in self.samples)
        self._nbytes = tokens * model.hidden_size * DTYPE.itemsize
        self._held = HiddenStates(Room(0, default_memory() // 4), self._nbytes)

    def __enter__(self) -> AssignedSchemes:
        return self

    def __exit__(self, *exc: object) -> None:
        self._held.__exit__(*exc)

    def start(self, advance: Callable[[float], None]) -> None:
        """Run the original."""
        LayerGradients(self.model, self.pool).forward(self.samples, self._held, False, advance)

    def divergences(self, assignment: Assignment, advance: Callable[[float], None]) -> list[float]:
        """Return KL(original || rounded) of each sample, the mean over its tokens."""
        changed = [Trace(sample.inputs) for sample in self.samples]
        applied = functools.partial(self._applied, assignment)
        rounded = LayerGradients(self.model, self.pool, applied)
        with HiddenStates(Room(0, default_memory() // 4), self._nbytes) as held:
            rounded.forward(changed, held, False, advance)
            with self.model.head():
                calls = [
                    functools.partial(divergence, self.model, before, self.model, after)
                    for before, after in zip(self.samples, changed, strict=True)
                ]
                return self.pool.do(enumerate(calls))

    @contextlib.contextmanager
    def _applied(
        self, assignment: Assignment, root: Module, without: Sequence[Module]
    ) -> Iterator[list[Wanted]]:
        """Hold the rounded weights of a layer in place of its own."""
        modules: dict[str, Any] = {
            self.names[m]: m for m in root.modules() if assignment.get(self.names[m]) is not None
        }
        with contextlib.ExitStack() as undo:
            for name, weight in self.rounding.under(assignment, modules).items():
                module, scheme = modules[name], assignment[name]
                undo.callback(setattr, module.weight, "data", module.weight.data)
                module.weight.data = weight
                assert scheme is not None
                if scheme.input_activations is not None:
                    hook = functools.partial(round_input, scheme)
                    undo.callback(module.register_forward_pre_hook(hook).remove)
            yield []


def round_input(scheme: QuantizationScheme, _: Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Round the input of a module under its scheme, as a forward pre-hook."""
    x = args[0].reshape(-1, args[0].shape[-1])
    rounding = input_rounding(scheme, x) if len(x) else None
    return args if rounding is None else (rounding(x).reshape(args[0].shape), *args[1:])
