"""Modules as they will be stored: weights and inputs rounded by the scheme that they have.

Scales come from the observers that the scheme names. Layers that the server fuses agree on a scale
if the format has one for all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    QuantizationStatus,
)
from compressed_tensors.quantization.lifecycle.forward import forward_quantize
from torch.nn import Module

from steelyard.formats import expected_tensors
from steelyard.formats.tensor_names import SCALE
from steelyard.fusion import fused_groups, shared_parameter
from steelyard.names import default_observer
from steelyard.observers import Observer
from steelyard.observers.importance_base import ImportanceObserver
from steelyard.observers.steps import args_for

__all__ = [
    "Rounding",
    "needs_importance",
    "per_token",
    "rounded_inputs",
    "rounded_weights",
    "set_importance_power",
    "shared_rounding",
    "stored_parameters",
    "token_rounding",
    "weight_observers",
    "with_scheme",
]

Rounding = Callable[[torch.Tensor], torch.Tensor]


def with_scheme(
    scheme: QuantizationScheme | None, shape: tuple[int, ...], dtype: torch.dtype
) -> Module:
    """Return a stand-in for a module under a scheme, for the functions below.

    shape, dtype: of its weight, in the type that it is stored in
    """
    holder: Any = Module()
    if scheme is not None:
        holder.quantization_scheme = scheme
        kind, sizes = expected_tensors(scheme, (shape[0], shape[1]), dtype)[SCALE]
        if kind.itemsize == 1:  # codes of values that observers return in fp32
            kind = torch.float32
        setattr(holder, SCALE, torch.empty(sizes, dtype=kind))  # scales as they are stored
    return holder  # type: ignore[no-any-return]


@torch.no_grad()
def rounded_weights(
    modules: Mapping[str, Module],
    weights: Mapping[str, torch.Tensor],
    squares: Mapping[str, tuple[torch.Tensor, int]],
) -> dict[str, torch.Tensor]:
    """Return the dequantized weights of modules, in fp32; those without a scheme as they are.

    weights: by module, in the type that they are stored in
    squares: the sum of x^2 of each column and the number of tokens, for observers that use it
    """
    observers = weight_observers(modules, weights, squares)
    return {
        name: _rounding(modules[name], "weight", observers[name].args, observers[name])(
            weight.float()
        )
        if name in observers
        else weight.float()
        for name, weight in weights.items()
    }


def weight_observers(
    modules: Mapping[str, Module],
    weights: Mapping[str, torch.Tensor],
    squares: Mapping[str, tuple[torch.Tensor, int]],
    power: float | None = None,
) -> dict[str, Observer]:
    """Return the observers of quantized weights, after they have seen them; see `rounded_weights`.

    power: of E[x^2], for observers that leave it to the algorithm
    """
    quantized = {n: a for n in weights if (a := args_for(modules[n], "weight")) is not None}
    observers = {name: _observer(args, "weight") for name, args in quantized.items()}
    for group in fused_groups(observers):
        if shared_parameter(quantized[group[0]], "weight") is not None:
            Observer.fuse([observers[name] for name in group])
    for name, observer in observers.items():
        if power is not None:
            set_importance_power(observer, power)
        if isinstance(observer, ImportanceObserver) and name in squares:
            observer.add_importance(*squares[name])
        observer(weights[name])
    return observers


def set_importance_power(observer: Any, power: float) -> None:
    """Set the power of E[x^2] that weights columns, if the observer's options leave it open."""
    if getattr(observer.options, "importance_power", 1.0) is None:
        observer.power = power


def stored_parameters(module: Module, observer: Observer) -> dict[str, torch.Tensor]:
    """Return the parameters that an observer finds for a weight, in their stored types."""
    return {
        kind: value if stored is None else value.to(stored.dtype).reshape(stored.shape)
        for kind, value in observer.get_qparams().items()
        if isinstance(value, torch.Tensor)
        for stored in [getattr(module, f"weight_{kind}", None)]
    }


def needs_importance(module: Module) -> bool:
    """Whether the observer of a module's weight cannot do without importance."""
    args = args_for(module, "weight")
    return args is not None and getattr(_observer(args, "weight"), "needs_importance", False)


def shared_rounding(
    modules: Mapping[str, Module], names: Sequence[str], x: torch.Tensor, unserved: str
) -> dict[str, Rounding]:
    """Return how modules round the input that they share, by name; those that do not are absent.

    Modules with equal schemes share one function of `rounded_inputs`.
    """
    found: dict[str, Rounding | None] = {}
    by_name: dict[str, Rounding] = {}
    for name in names:
        args = args_for(modules[name], "input")
        key = "" if args is None else args.model_dump_json()
        if key not in found:
            found[key] = rounded_inputs(modules[name], x, unserved)
        if (rounding := found[key]) is not None:
            by_name[name] = rounding
    return by_name


@torch.no_grad()
def rounded_inputs(module: Module, x: torch.Tensor, unserved: str = "note") -> Rounding | None:
    """Return a function that rounds inputs of a module; None if they are not rounded.

    x:        (tokens, channels), inputs for the observer of a static scale
    unserved: what happens if no static scale serves them: note, dynamic or leave
    """
    args = args_for(module, "input")
    if args is None:
        return None
    if args.dynamic is True:
        return _rounding(module, "input", args, None)
    observer = _observer(args, "input")
    observer(x[None])
    if unserved != "note" and observer.unserved() is not None:
        return _rounding(module, "input", per_token(args), None) if unserved == "dynamic" else None
    return _rounding(module, "input", args, observer)


def token_rounding(modules: Mapping[str, Module], names: Sequence[str]) -> dict[str, Rounding]:
    """Return how modules round their inputs with a scale for each token instead of a static one."""
    found: dict[str, Rounding] = {}
    for name in names:
        args = args_for(modules[name], "input")
        if args is not None:
            served = per_token(args) if args.dynamic is False else args
            found[name] = _rounding(modules[name], "input", served, None)
    return found


def per_token(args: QuantizationArgs) -> QuantizationArgs:
    """Return the same type with a scale for each token, which a server computes."""
    changed = {"dynamic": True, "strategy": "token", "observer": None, "observer_kwargs": {}}
    return args.model_copy(update=changed)


def _observer(args: QuantizationArgs, base_name: str) -> Observer:
    name = args.observer or default_observer(base_name, args.strategy)
    return Observer.load_from_registry(name, base_name=base_name, args=args)


def _rounding(
    module: Module, base_name: str, args: QuantizationArgs, observer: Observer | None
) -> Rounding:
    holder: Any = Module()
    holder.quantization_status = QuantizationStatus.FROZEN
    found = [] if observer is None else list(observer.get_qparams().items())
    for kind, value in found:
        if isinstance(value, torch.Tensor):
            stored = getattr(module, f"{base_name}_{kind}", None)
            if stored is not None:
                value = value.to(stored.dtype).reshape(stored.shape)
            setattr(holder, f"{base_name}_{kind}", value)
    batched = base_name != "weight"

    def rounded(value: torch.Tensor) -> torch.Tensor:
        flat = batched and value.ndim == 2
        result: torch.Tensor = forward_quantize(
            holder, value[None] if flat else value, base_name, args
        )
        return (result[0] if flat else result).to(value.dtype)

    return rounded
