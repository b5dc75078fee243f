"""The observer options of a recipe: `minmax`, or `{name: mse, averaging_constant: 0.01}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import BaseModel, ConfigDict, Field, model_validator

from steelyard.formats.signed_scales import reads_signed_scales
from steelyard.names import default_observer
from steelyard.observers import Observer
from steelyard.observers.observer_options import parse_options

__all__ = ["ObserverChoice", "observed", "with_default", "with_observers"]


class ObserverChoice(BaseModel):
    """A registered observer and its options."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    options: dict[str, Any] = Field(default_factory=dict)

    @model_validator(mode="before")
    @classmethod
    def _from_name_or_mapping(cls, value: Any) -> Any:
        if isinstance(value, str):
            return {"name": value}
        if isinstance(value, Mapping) and "name" in value and "options" not in value:
            return {
                "name": value["name"],
                "options": {k: v for k, v in value.items() if k != "name"},
            }
        return value

    @model_validator(mode="after")
    def _is_known(self) -> ObserverChoice:
        check_observer(self.name, self.options)
        return self


def check_observer(name: str, options: Mapping[str, Any]) -> None:
    """Refuse an unknown observer and options that it does not have."""
    observer = Observer.get_value_from_registry(name)
    if observer.Options is not None:
        parse_options(observer.Options, options, name)


def with_observers(
    scheme: QuantizationScheme,
    weights: ObserverChoice | None,
    inputs: ObserverChoice | None,
    outputs: ObserverChoice | None,
) -> QuantizationScheme:
    """Return a copy of `scheme` with the chosen observers, else its own, else the default."""
    stored = observed(scheme.weights, weights, "weight")
    if stored is not None and reads_signed_scales(scheme):
        stored = _signed(stored)
    chosen = {
        "weights": stored,
        "input_activations": observed(scheme.input_activations, inputs, "input"),
        "output_activations": observed(scheme.output_activations, outputs, "output"),
    }
    return scheme.model_copy(update=chosen)


def _signed(args: QuantizationArgs) -> QuantizationArgs:
    """Let the observer choose negative scales, unless the recipe says whether it may."""
    options = args.observer_kwargs or {}
    declared = Observer.get_value_from_registry(args.observer or "").Options
    knows = declared is not None and "negative_scales" in declared.model_fields
    if not knows or "negative_scales" in options:
        return args
    return args.model_copy(update={"observer_kwargs": {**options, "negative_scales": True}})


def observed(
    args: QuantizationArgs | None, choice: ObserverChoice | None, base_name: str
) -> QuantizationArgs | None:
    """Return a copy of `args` with the chosen observer, else its own, else the default."""
    if args is None or args.dynamic is True:
        return None if args is None else args.model_copy(deep=True)
    if choice is not None:
        return args.model_copy(
            update={"observer": choice.name, "observer_kwargs": dict(choice.options)}
        )
    name = args.observer or default_observer(base_name, args.strategy)
    check_observer(name, args.observer_kwargs or {})
    return args.model_copy(update={"observer": name}, deep=True)


def with_default(scheme: Any, field: str, base_name: str) -> Any:
    """Fill in the default in arguments of a recipe that name no observer.

    Needed only if the installed compressed-tensors would fill in one of its own.
    """
    args = scheme.get(field) if isinstance(scheme, Mapping) else None
    if not isinstance(args, Mapping) or args.get("observer") or args.get("dynamic") is True:
        return scheme
    if QuantizationArgs(num_bits=8).observer is None:
        return scheme
    strategy = args.get("strategy") or ("group" if args.get("group_size") else None)
    return {**scheme, field: {**args, "observer": default_observer(base_name, strategy)}}
