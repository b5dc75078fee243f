"""Second moments of the inputs of a model's modules, one layer after another.

The sum of x^T x over all tokens gives the output error of any rounded weight: of an error E of the
weight, the squared error of the outputs is tr(E H E^T). Only those of one layer are in memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import Linear, Module

from steelyard.data.limits import learned_positions
from steelyard.data.samples import load_samples
from steelyard.data.tokenizer import tokenizer_of
from steelyard.model.blocks import Batch
from steelyard.model.cost import Costs
from steelyard.model.layerwise import HiddenStates, LayerwiseModel, default_memory
from steelyard.model.opening import open_model
from steelyard.model.placement import placement_of

__all__ = ["InputMoment", "LayerInputs"]


@dataclass
class InputMoment:
    """Sum of x^T x over the tokens of one input, (columns, columns), fp32."""

    product: torch.Tensor
    tokens: int = 0

    def add(self, x: torch.Tensor) -> None:
        rows = x.detach().reshape(-1, x.shape[-1]).float()
        self.product.addmm_(rows.t(), rows)
        self.tokens += len(rows)

    @property
    def squares(self) -> torch.Tensor:
        """Sum of squares of each channel."""
        return self.product.diagonal().clone()

    def energy(self, weight: torch.Tensor) -> float:
        """Return the sum of squares of the outputs of a weight."""
        wide = weight.float()
        return float(((wide @ self.product) * wide).sum(dtype=torch.float64).clamp(min=0))


class LayerInputs:
    """Runs a model on text, and yields the moments of each layer's inputs.

    description: the samples that it runs
    """

    def __init__(
        self,
        model: str | Path,
        data: Any,
        *,
        num_samples: int,
        max_seq_length: int,
        batch_size: int,
        text_column: str,
        split: str | None,
        seed: int,
        device: Any,
        trust_remote_code_model: bool,
    ) -> None:
        source, _ = open_model(model, trust_remote_code_model)
        placement = placement_of(device, model)
        source.place(placement)
        self.runner = LayerwiseModel(source, "base")
        samples = load_samples(
            data,
            tokenizer=lambda: tokenizer_of(None, source, trust_remote_code_model),
            num_calibration_samples=num_samples,
            max_seq_length=max_seq_length,
            batch_size=batch_size,
            text_column=text_column,
            split=split,
            shuffle=False,
            seed=seed,
            vocab_size=self.runner.vocab_size,
            max_positions=learned_positions(source.model),
        )
        self.description = samples.description
        self._inputs = [placement.bring_all(batch) for batch in samples.batches]

    def walk(
        self, wanted: Collection[str], advance: Callable[..., None]
    ) -> Generator[dict[str, InputMoment], None, None]:
        """Yield, layer by layer and at last outside of them, module -> moment of its input.

        wanted: modules, by their names in the files
        """
        runner = self.runner
        source = runner.source
        modules = {
            key: module
            for name, module in source.model.named_modules()
            if isinstance(module, Linear) and (key := source.module_key(name)) in wanted
        }
        tokens = sum(batch["input_ids"].numel() for batch in self._inputs)
        nbytes = tokens * runner.hidden_size * 4
        costs = Costs(source.model, runner.sequence.modules, tokens)
        with (
            HiddenStates(nbytes, default_memory()) as held,
            contextlib.ExitStack() as hooks,
        ):
            moments = _Moments(modules, hooks)
            batches = [Batch({**inputs}) for inputs in self._inputs]
            for _ in runner.walk(batches, held, costs, lambda _, where: advance(0, where)):
                yield moments.taken()
            inside = {id(m) for layer in runner.sequence.modules for m in layer.modules()}
            if any(id(module) not in inside for module in modules.values()):
                with runner.head(), torch.no_grad():
                    for batch in batches:
                        runner.logits(batch, slice(0, None))
                yield moments.taken()


class _Moments:
    """Moments of the inputs that modules are called with; modules with one input share one."""

    def __init__(self, modules: Mapping[str, Module], hooks: contextlib.ExitStack) -> None:
        self._found: dict[str, InputMoment] = {}
        self._last: tuple[torch.Tensor, InputMoment] | None = None
        for name, module in modules.items():
            handle = module.register_forward_pre_hook(self._hook(name))
            hooks.callback(handle.remove)

    def taken(self) -> dict[str, InputMoment]:
        """Return the moments so far, and begin anew."""
        found, self._found, self._last = self._found, {}, None
        return found

    def _hook(self, name: str) -> Callable[..., None]:
        def see(_module: Module, args: tuple[torch.Tensor, ...]) -> None:
            x = args[0]
            if self._last is not None and self._last[0] is x:
                if self._found.setdefault(name, self._last[1]) is self._last[1]:
                    return
            elif name not in self._found:
                empty = torch.zeros(x.shape[-1], x.shape[-1], device=x.device)
                self._found[name] = InputMoment(empty)
            self._found[name].add(x)
            self._last = x, self._found[name]

        return see
