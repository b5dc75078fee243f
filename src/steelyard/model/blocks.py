"""Runs a model's decoder layers one at a time over cached hidden states.

The model's own forward runs once per batch with every layer replaced by a stub, which records the
arguments (mask, position embeddings, whatever the class passes) and returns the hidden state
unchanged. Layer i then runs with the recorded arguments and the real hidden states, so only one
layer's weights need to be in memory.

A model is refused if its forward changes the hidden state between layers, or passes anything else
from one layer to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import Module, ModuleList

from steelyard.errors import PipelineError
from steelyard.model.early_stop import StopForward
from steelyard.model.forward_errors import WITHOUT_DATA, forward_errors

__all__ = ["Batch", "LayerSequence", "decoder_layers"]

_AS_A_WHOLE = 'pipeline="basic" runs the model as a whole'


@dataclass
class Call:
    """Arguments of one layer, besides the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class Batch:
    """One batch: its token ids, current hidden state and recorded layer calls.

    original: hidden state of the unquantized model, where an algorithm needs it
    """

    input_ids: torch.Tensor
    hidden: torch.Tensor
    original: torch.Tensor | None = None
    calls: list[Call] = field(default_factory=list)


class _Withheld:
    """Placeholder for a tensor that a layer returns after the hidden state."""


def decoder_layers(model: Any) -> tuple[str, ModuleList]:
    """Return the name of the list of decoder layers, and the list."""
    classes = set(getattr(model, "_no_split_modules", None) or ())
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else None
    depth = getattr(config, "num_hidden_layers", None)
    text = set(_text_model(model).modules())  # a vision tower may be as deep
    lists = [(n, m) for n, m in model.named_modules() if isinstance(m, ModuleList) and len(m) > 0]
    lists = [(n, m) for n, m in lists if m in text]
    known = [(n, m) for n, m in lists if all(type(layer).__name__ in classes for layer in m)]
    deep = [(n, m) for n, m in known or lists if depth is None or len(m) == depth]
    if len(deep) != 1:
        raise PipelineError(
            f"{type(model).__name__} has {len(deep)} lists of {depth} layers, so its decoder "
            f"layers cannot be identified; {_AS_A_WHOLE}"
        )
    return deep[0]


def _text_model(model: Any) -> Module:
    """Return the text decoder; the whole model if it does not name one."""
    found: Module | None = model.get_decoder() if hasattr(model, "get_decoder") else None
    if isinstance(found, Module) and any(isinstance(m, ModuleList) for m in found.modules()):
        return found
    whole: Module = model  # some classes call their output head the decoder
    return whole


class LayerSequence:
    """Runs the layers of a model one at a time over all batches."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.name, self.layers = decoder_layers(model)
        self._shared: list[torch.Tensor] = []
        self._extra: tuple[Any, ...] | None = None  # what layers return after the hidden state

    @torch.no_grad()
    def start(self, batches: list[torch.Tensor], advance: Callable[[], None]) -> list[Batch]:
        """Embed every batch and record the arguments of each layer.

        The parameters outside the layers and those of the first layer must be in memory.
        """
        started: list[Batch] = []
        if not batches:  # a rank without batches
            return started
        self._inspect_outputs(batches[0][:, :1])
        for input_ids in batches:
            batch = Batch(input_ids, torch.empty(0))
            previous: list[torch.Tensor] = []

            def record(
                index: int,
                *args: Any,
                batch: Batch = batch,
                previous: list[torch.Tensor] = previous,
                **kwargs: Any,
            ) -> Any:
                hidden, args, kwargs = _split(args, kwargs)
                if index == 0:
                    batch.hidden = hidden
                elif hidden is not previous[0]:
                    raise self._refusal(f"changes the hidden state before layer {index}")
                if _is_withheld((args, kwargs)):
                    raise self._refusal(
                        f"passes more than the hidden state from layer {index - 1} to {index}"
                    )
                previous[:] = [hidden]
                batch.calls.append(Call(self._share(args), self._share(kwargs)))
                if index == len(self.layers) - 1:
                    raise StopForward
                return self._output(hidden)

            with (
                forward_errors(self.model, f"the modules around {self.name}", _AS_A_WHOLE),
                self._replaced(record),
                contextlib.suppress(StopForward),
            ):
                self.model(input_ids=input_ids, use_cache=False)
            if len(batch.calls) != len(self.layers):
                raise self._refusal(
                    f"calls {len(batch.calls)} of its {len(self.layers)} layers on token ids"
                )
            started.append(batch)
            advance()
        return started

    def run(self, index: int, batch: Batch, original: bool = False) -> torch.Tensor:
        """Return the output of layer `index` for a batch; its weights must be in memory.

        original: run on the hidden states of the unquantized model
        """
        call = batch.calls[index]
        hidden = batch.original if original else batch.hidden
        assert hidden is not None
        output: Any = hidden
        with (
            forward_errors(self.model, f"{self.name}.{index}", _AS_A_WHOLE),
            contextlib.suppress(StopForward),  # raised by `StopAfter`, whose caller needs no output
        ):
            output = self.layers[index](hidden, *call.args, **call.kwargs)
        found: torch.Tensor = output[0] if isinstance(output, tuple) else output
        return found

    @torch.no_grad()
    def finish(self, batch: Batch) -> Any:
        """Run the modules after the layers; their parameters must be in memory."""

        def skip(index: int, *args: Any, **kwargs: Any) -> Any:
            hidden, _, _ = _split(args, kwargs)
            return self._output(batch.hidden if index == len(self.layers) - 1 else hidden)

        with (
            forward_errors(self.model, f"the modules after {self.name}", _AS_A_WHOLE),
            self._replaced(skip),
        ):
            return self.model(input_ids=batch.input_ids, use_cache=False)

    def _inspect_outputs(self, input_ids: torch.Tensor) -> None:
        """Run the first layer on one token to find out what layers return besides hidden states."""
        found: list[Any] = []

        def inspect(_module: Module, _args: Any, output: Any) -> None:
            found.append(output)
            raise StopForward

        versions = _versions(self.model)
        handle = self.layers[0].register_forward_hook(inspect)
        try:
            with (
                forward_errors(self.model, f"{self.name}.0", WITHOUT_DATA),
                contextlib.suppress(StopForward),
            ):
                self.model(input_ids=input_ids, use_cache=False)
        finally:
            handle.remove()
        if not found:
            raise self._refusal(f"does not call {self.name}.0 on token ids")
        if versions != _versions(self.model):
            raise PipelineError(
                f"{type(self.model).__name__} changes its own weights when it runs, so they no "
                f"longer match the checkpoint; {WITHOUT_DATA}"
            )
        self._extra = None
        if isinstance(found[0], tuple):
            self._extra = tuple(_withheld(value) for value in found[0][1:])

    def _output(self, hidden: torch.Tensor) -> Any:
        """Return a hidden state in the structure that layers return."""
        return hidden if self._extra is None else (hidden, *self._extra)

    def _refusal(self, why: str) -> PipelineError:
        return PipelineError(
            f"{type(self.model).__name__} {why}, so its layers cannot run alone; {_AS_A_WHOLE}"
        )

    @contextlib.contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        def bound(index: int) -> Callable[..., Any]:
            return lambda *args, **kwargs: forward(index, *args, **kwargs)

        before = [layer.__dict__.get("forward") for layer in self.layers]
        try:
            for index, layer in enumerate(self.layers):
                layer.__dict__["forward"] = bound(index)
            yield
        finally:
            for layer, present in zip(self.layers, before, strict=True):
                del layer.__dict__["forward"]
                if present is not None:
                    layer.__dict__["forward"] = present

    def _share(self, value: Any) -> Any:
        """Keep one copy of tensors that are equal in many batches, such as masks."""
        if isinstance(value, torch.Tensor):
            for known in self._shared:
                if known is value:
                    return known
                alike = known.shape == value.shape and known.dtype == value.dtype
                if alike and torch.equal(known, value):
                    return known
            if len(self._shared) < 256:
                self._shared.append(value)
            return value
        if isinstance(value, (tuple, list)):
            return type(value)(self._share(v) for v in value)
        if isinstance(value, dict):
            return {k: self._share(v) for k, v in value.items()}
        return value


def _versions(model: Module) -> list[int]:
    """Return torch's write counter of each parameter."""
    return [0 if p.is_inference() else p._version for p in model.parameters()]


def _withheld(value: Any) -> Any:
    """Replace the tensors in a value by placeholders, so that using one fails."""
    if isinstance(value, torch.Tensor):
        return _Withheld()
    if isinstance(value, (tuple, list)):
        return type(value)(_withheld(v) for v in value)
    return value


def _is_withheld(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        return any(map(_is_withheld, value.values() if isinstance(value, dict) else value))
    return isinstance(value, _Withheld)


def _split(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, tuple[Any, ...], dict[str, Any]]:
    """Separate the hidden state from the other arguments of a layer."""
    if args:
        return args[0], args[1:], kwargs
    return kwargs["hidden_states"], (), {k: v for k, v in kwargs.items() if k != "hidden_states"}
