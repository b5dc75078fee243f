"""Which observer a recipe asks for: `minmax`, or `{name: mse, averaging_constant: 0.01}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import BaseModel, ConfigDict, Field, model_validator

from steelyard.observers import Observer
from steelyard.observers.observer_options import parse_options

__all__ = ["ObserverChoice", "check_observer", "with_observers"]


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
    """Return a copy of `scheme` with the observers chosen; its own stay where none is."""
    chosen = {
        "weights": _observed(scheme.weights, weights),
        "input_activations": _observed(scheme.input_activations, inputs),
        "output_activations": _observed(scheme.output_activations, outputs),
    }
    return scheme.model_copy(update=chosen)


def _observed(
    args: QuantizationArgs | None, choice: ObserverChoice | None
) -> QuantizationArgs | None:
    if args is None:
        return None
    if choice is not None and args.dynamic is not True:
        return args.model_copy(
            update={"observer": choice.name, "observer_kwargs": dict(choice.options)}
        )
    if args.observer is not None:
        check_observer(args.observer, args.observer_kwargs or {})
    return args.model_copy(deep=True)
