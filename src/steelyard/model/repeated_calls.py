"""Finds out, before any data and weights, whether a model calls one of its layers more than once.

Such a model loops over its layers, as HRM-Text does, so they cannot run one after another. Its
forward runs on tensors without values (torch's fake tensors), with a stub in the place of every
layer. Nothing is computed or loaded.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import Module, Parameter

from steelyard.model.inputs import call_options, hidden_of, without_cache
from steelyard.model.restoring import restored
from steelyard.model.stacks import Layer

__all__ = ["repeated_layer"]

_TOKENS = 8


class _CalledAgain(Exception):
    """Ends the forward; its message is the name of the layer."""


def repeated_layer(model: Any, layers: Iterable[Layer]) -> str | None:
    """Return the name of a layer that the forward calls again; None if it does not.

    Also None where that cannot be told without data: the forward takes other inputs than token ids,
    or looks at values, or parameters are offloaded and would be loaded for it. The run then
    refuses the layer when it is called again.
    """
    if any(type(module._parameters) is not dict for module in model.modules()):
        return None
    try:
        with (
            restored(model),
            without_cache(model),
            torch.no_grad(),
            warnings.catch_warnings(),
            FakeTensorMode(allow_non_fake_inputs=True),
        ):
            warnings.simplefilter("ignore")  # the run gives them, with data
            called: set[Module] = set()
            for layer in layers:
                layer.module.__dict__["forward"] = _stub(layer, called)
            for module in model.modules():
                _make_fake(module)
            tokens = torch.ones(1, _TOKENS, dtype=torch.int64)
            model(input_ids=tokens, **call_options(model))
    except _CalledAgain as again:
        return str(again)
    except Exception:  # of the model's own code, which had no data; the run itself tells
        return None
    return None


def _stub(layer: Layer, called: set[Module]) -> Callable[..., torch.Tensor]:
    def stub(*args: Any, **kwargs: Any) -> torch.Tensor:
        if layer.module in called:
            raise _CalledAgain(layer.name)
        called.add(layer.module)
        return torch.empty_like(hidden_of(args, kwargs))

    return stub


def _make_fake(module: Module) -> None:
    """Replace parameters that are on the meta device, which do not mix with buffers."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.device.type == "meta":
            value = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            module._parameters[name] = Parameter(value, requires_grad=False)
