"""The arguments of a model's forward: tensors of a sample, and options that disable its cache."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from steelyard.errors import DataError, nearest
from steelyard.model.placeholders import Ref

__all__ = [
    "LOSS_MASK",
    "accepted_inputs",
    "call_options",
    "check_inputs",
    "forward_inputs",
    "hidden_of",
    "input_embedding",
    "output_head",
    "padding_mask",
    "padding_of",
    "without_cache",
]

_MASKS = ("attention_mask", "decoder_attention_mask")
LOSS_MASK = "loss_mask"  # tokens that run, but do not count
_REST = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def accepted_inputs(model: Any) -> set[str]:
    """Return the names that the forward of a model accepts, or a submodule it passes them to."""
    parts = [model, *(m for m in model.children() if hasattr(m, "config"))]
    return {name for part in parts for name in _parameters(part)}


def check_inputs(model: Any, inputs: Mapping[str, torch.Tensor], where: str) -> None:
    """Raise a DataError for inputs that the model's forward does not accept, or that are missing.

    where: the sample, for messages
    """
    accepted, kind = accepted_inputs(model), type(model).__name__
    for name in forward_inputs(inputs):
        if name not in accepted:
            raise DataError(
                f"{where}: the forward of {kind} does not accept {name} "
                f"{tuple(inputs[name].shape)}; remove it from the data. "
                f"{nearest(name, sorted(accepted))}"
            )
    needed = [n for n, p in _parameters(model).items() if p.default is inspect.Parameter.empty]
    missing = [name for name in needed if name not in inputs]
    if missing:
        given = ", ".join(inputs)
        raise DataError(f"{where}: {kind} needs {', '.join(missing)}, and the sample has {given}")


def _parameters(module: Any) -> dict[str, inspect.Parameter]:
    parameters = inspect.signature(module.forward).parameters.items()
    return {name: p for name, p in parameters if p.kind not in _REST}


def call_options(model: Any) -> dict[str, Any]:
    """Return the options that every call of the model gets."""
    return {"use_cache": False} if "use_cache" in _parameters(model) else {}


def forward_inputs(inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the inputs that go to the model's forward."""
    return {name: value for name, value in inputs.items() if name != LOSS_MASK}


@contextlib.contextmanager
def without_cache(model: Any) -> Iterator[None]:
    """Disable caches in the configs of the model and its submodels; restore them on exit."""
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    using = [config for config in configs.values() if getattr(config, "use_cache", None) is True]
    try:
        for config in using:
            config.use_cache = False
        yield
    finally:
        for config in using:
            config.use_cache = True


def output_head(model: Any) -> str | None:
    """Return the name of the output head; None if the model has none."""
    try:
        head = model.get_output_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return next((n for n, m in model.named_modules() if head is not None and m is head), None)


def input_embedding(model: Any) -> str | None:
    """Return the name of the token embedding; None if the model does not tell."""
    owner = getattr(getattr(model, "known", None), "model", model)  # the class, for bare files
    try:
        found = owner.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    name = next((n for n, m in owner.named_modules() if m is found), None)
    files = {own: file for file, own in getattr(model, "class_names", {}).items()}
    return None if name is None else files.get(name, name)


def hidden_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the hidden state among the arguments of a layer: the first tensor, or a `Ref`."""
    given = [*args, *([kwargs["hidden_states"]] if "hidden_states" in kwargs else ())]
    return next(v for v in [*given, *kwargs.values()] if isinstance(v, (torch.Tensor, Ref)))


def padding_mask(inputs: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
    """Return the mask of tokens that count in a model's input; None if all do."""
    masks = [inputs[name] for name in _MASKS if name in inputs and not bool(inputs[name].all())]
    return _counted(inputs, masks[0] if masks else None)


def padding_of(inputs: Mapping[str, torch.Tensor], hidden: torch.Tensor) -> torch.Tensor | None:
    """Return the mask of hidden states that count, (batch, seq); None without one."""
    shape = hidden.shape[:2]
    mask = next((inputs[n] for n in _MASKS if n in inputs and inputs[n].shape == shape), None)
    return _counted(inputs, mask) if LOSS_MASK in inputs else mask


def _counted(inputs: Mapping[str, torch.Tensor], mask: torch.Tensor | None) -> torch.Tensor | None:
    """Return a padding mask without the tokens whose loss_mask is 0."""
    loss = inputs.get(LOSS_MASK)
    if loss is None or mask is None:
        return mask if loss is None else loss
    return mask.bool() & loss.bool()
