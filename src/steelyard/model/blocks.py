"""Runs the layers of a model one at a time, each over all batches.

The model's own forward determines the arguments of each layer. It runs with a stub in place of
every layer, which records the call. A stub returns the layer's output if it is known, else
placeholders, which the forward may pass to the next layer but not compute with (`placeholders`).
If it does, the forward stops; it runs again once the layers whose values it needs have run. So one
forward records the calls of a whole decoder, two those of a vision tower and a decoder, and a model
that changes the hidden state between two layers needs one more. Nothing is traced: between the
layers, the model's own code runs.

Outputs are kept only while they are needed.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import weakref
from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.nn import Module, ModuleList

from steelyard.errors import PipelineError
from steelyard.model.activations import HiddenStates, fetched
from steelyard.model.batch_state import Batch, Call
from steelyard.model.early_stop import StopForward
from steelyard.model.forward_errors import WITHOUT_DATA, forward_errors
from steelyard.model.inputs import (
    call_options,
    forward_inputs,
    hidden_of,
    padding_of,
    without_cache,
)
from steelyard.model.placeholders import (
    Ref,
    Structure,
    Touched,
    Unknown,
    filled,
    replaced,
    structure_of,
)
from steelyard.model.stacks import AS_A_WHOLE, model_layers, refusal
from steelyard.observers.padding import without_padding
from steelyard.observers.token_weights import hidden_state

__all__ = ["Batch", "LayerSequence"]


class LayerSequence:
    """Runs the layers of a model one at a time over all batches, while it is entered.

    held:       stores hidden states between two layers; None leaves them where they are
    structures: structure of each layer's output
    is_stateful: whether layers pass values in an object that they modify, such as Gemma 4's shared
                 keys and values; it is not saved to files, so the run cannot resume
    weighs_tokens: whether statistics weigh tokens by their hidden states, whose sizes cost a little
    """

    def __init__(self, model: Any, held: HiddenStates | None = None) -> None:
        self.model = model
        self.held = held
        self.layers = model_layers(model)
        self.modules = ModuleList([layer.module for layer in self.layers])
        self.structures: dict[int, Structure] = {}
        self.is_stateful = False
        self.weighs_tokens = False
        self._options = call_options(model)
        self._shared: list[torch.Tensor] = []
        self._checked = False
        self._replay: contextvars.ContextVar[_Replay | None] = contextvars.ContextVar(
            "replay", default=None
        )
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> LayerSequence:
        self._entered.enter_context(without_cache(self.model))
        for index, module in enumerate(self.modules):
            before = module.__dict__.get("forward")
            self._entered.callback(_put_forward, module, before)
            module.__dict__["forward"] = self._stub(index, module.forward)
        return self

    def __exit__(self, *exc: object) -> None:
        self._entered.close()

    def __len__(self) -> int:
        return len(self.layers)

    def name(self, index: int) -> str:
        return self.layers[index].name

    @torch.no_grad()
    def advance(self, batch: Batch, done: int) -> None:
        """Record the calls of layers from `done` on, as far as known outputs allow.

        The parameters outside the layers must be in memory.
        """
        versions = None if self._checked else _versions(self.model)
        self._forward(batch, done, f"the modules around {self.name(min(done, len(self) - 1))}")
        if versions is not None and versions != _versions(self.model):
            raise PipelineError(
                f"{type(self.model).__name__} changes its own weights in its forward, so they no "
                f"longer match the checkpoint; {WITHOUT_DATA}"
            )
        self._checked = True

    def run(self, index: int, batch: Batch, module: Module | None = None) -> Any:
        """Return the output of a layer for a batch; its weights must be in memory.

        module: a copy of the layer to run instead
        """
        call = batch.calls[index]

        def value(leaf: Any) -> Any:
            return fetched(leaf.of(batch.outputs[leaf.layer]) if isinstance(leaf, Ref) else leaf)

        args, kwargs = replaced(call.args, value), replaced(call.kwargs, value)
        hidden = hidden_of(args, kwargs)
        with (
            forward_errors(self.model, self.name(index), AS_A_WHOLE),
            without_padding(padding_of(batch.inputs, hidden)),
            hidden_state(hidden) if self.weighs_tokens else contextlib.nullcontext(),
            contextlib.suppress(StopForward),  # raised by `StopAfter`, whose caller needs no output
        ):
            return (module or self.modules[index])(*args, **kwargs)

    def input(self, index: int, batch: Batch) -> torch.Tensor:
        """Return the hidden state that goes into a layer."""
        found: torch.Tensor = fetched(self.stored_input(index, batch))
        return found

    def stored_input(self, index: int, batch: Batch) -> torch.Tensor:
        """Return the hidden state that goes into a layer, where it is stored."""
        call = batch.calls[index]
        hidden = hidden_of(call.args, call.kwargs)
        found: torch.Tensor = (
            hidden.of(batch.outputs[hidden.layer]) if isinstance(hidden, Ref) else hidden
        )
        return found

    def put(self, index: int, batch: Batch, output: Any) -> None:
        """Store the output of a layer, and drop outputs that are no longer needed."""
        structure = structure_of(output, self.stored_input(index, batch), self.name(index))
        assumed = batch.calls.pop(index).assumed  # and its input goes, which makes room
        self.structures[index] = structure
        if structure != assumed:  # later calls were recorded with a wrong placeholder
            batch.calls.clear()
            batch.waiting = {index}
            batch.needed.add(index)
        kept = batch.needed.union(*(call.layers for call in batch.calls.values()))
        for layer in [each for each in batch.outputs if each not in kept]:
            del batch.outputs[layer]
        if index in kept:
            batch.outputs[index] = self.stored(output)

    def stored(self, value: Any) -> Any:
        """Return hidden states as `held` stores them."""
        return value if self.held is None else replaced(value, self.held.put)

    def finish(self, batch: Batch) -> Any:
        """Run the modules after the layers; their parameters must be in memory.

        Gradients pass to the outputs of the layers if they are enabled.
        """
        return self._forward(batch, len(self), f"the modules after {self.name(len(self) - 1)}")

    def _forward(self, batch: Batch, done: int, where: str) -> Any:
        """Run the model's forward with stubs for layers; again while it needs known outputs."""
        while True:
            batch.calls.clear()
            replay = _Replay(self, batch, done)
            token = self._replay.set(replay)
            try:
                with forward_errors(self.model, where, AS_A_WHOLE, passing=Touched):
                    output = self.model(**forward_inputs(batch.inputs), **self._options)
                batch.waiting = None
                return output
            except Touched as stop:
                batch.waiting = stop.layers
                batch.needed |= stop.layers | replay.held()
                gone = {i for i in stop.layers if i < done and i not in batch.outputs}
            finally:
                self._replay.reset(token)
            if gone:
                raise refusal(self.model, f"uses the output of {self.name(min(gone))} again")
            if any(layer >= done for layer in batch.waiting):
                return None

    def guess(self, index: int) -> Structure:
        """Return the output structure of a layer, or that of the last layer of its class."""
        kind = type(self.modules[index])
        alike = [i for i in range(index, -1, -1) if type(self.modules[i]) is kind]
        return next((self.structures[i] for i in alike if i in self.structures), "hidden")

    def share(self, value: Any) -> Any:
        """Keep one copy of tensors that are equal in many batches, such as masks."""
        if not isinstance(value, torch.Tensor):
            return value
        for known in self._shared:
            if known is value or _equal(known, value):
                return known
        if len(self._shared) < 256:
            self._shared.append(value)
        return value

    def _stub(self, index: int, forward: Callable[..., Any]) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            replay = self._replay.get()
            return forward(*args, **kwargs) if replay is None else replay.call(index, args, kwargs)

        return stub


class _Replay:
    """One run of the model's forward with stubs in place of layers."""

    def __init__(self, sequence: LayerSequence, batch: Batch, done: int) -> None:
        self.sequence = sequence
        self.batch = batch
        self.done = done
        self._called: set[int] = set()
        self._given: list[weakref.ref[Unknown]] = []

    def call(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        sequence, batch = self.sequence, self.batch
        if index in self._called:
            raise refusal(sequence.model, f"calls {sequence.name(index)} more than once")
        self._called.add(index)
        if index < self.done and index in batch.outputs and index in batch.needed:
            return replaced(batch.outputs[index], lambda value: _copied(fetched(value)))
        structure, hidden = sequence.guess(index), hidden_of(args, kwargs)
        if index >= self.done:
            given, named = replaced((args, kwargs), functools.partial(self._recorded, hidden))
            batch.calls[index] = Call(given, named, structure)
        like = hidden.like if isinstance(hidden, Unknown) else hidden

        def leaf(place: tuple[int | str, ...], kind: str) -> Unknown:
            made = Unknown.of(Ref(index, place), like if kind == "hidden" else None)
            self._given.append(weakref.ref(made))
            return made

        return filled(structure, leaf)

    def held(self) -> set[int]:
        """Return the layers whose placeholders the forward still holds and may use."""
        alive = (ref() for ref in self._given)
        layers = {each.ref.layer for each in alive if each is not None}
        return {i for i in layers if i >= self.done or i in self.batch.outputs}

    def _recorded(self, hidden: torch.Tensor, value: Any) -> Any:
        if isinstance(value, MutableMapping):
            self.sequence.is_stateful = True
        if isinstance(value, Unknown):
            return value.ref
        # a hidden state is that of one batch
        return self.sequence.stored(value) if value is hidden else self.sequence.share(value)


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are alike; masks are compared eight values at a time."""
    if (a.shape, a.dtype) != (b.shape, b.dtype):
        return False
    if all(map(_in_words, (a, b))):
        a, b = (each.view(-1).view(torch.int64) for each in (a, b))
    return torch.equal(a, b)


def _in_words(x: torch.Tensor) -> bool:
    whole = x.numel() % 8 == 0 and x.storage_offset() % 8 == 0
    return x.dtype == torch.bool and x.is_contiguous() and whole


def _copied(value: Any) -> Any:
    """Return a copy of a tensor, since the model's code may modify its arguments."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _put_forward(module: Module, forward: Any) -> None:
    del module.__dict__["forward"]
    if forward is not None:
        module.__dict__["forward"] = forward


def _versions(model: Module) -> list[int]:
    """Return torch's write counter of each parameter."""
    return [0 if p.is_inference() else p._version for p in model.parameters()]
