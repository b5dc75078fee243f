"""The options of `QuantizationModifier`, and the quantization config made from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any, ClassVar

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    is_preset_scheme,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pydantic import Field, field_validator, model_validator

from steelyard.errors import RecipeError, nearest
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.observer_choice import (
    ObserverChoice,
    observed,
    with_default,
    with_observers,
)
from steelyard.modifiers.schemes import (
    CHANGES,
    args_problem,
    changed_preset,
    scheme_problems,
    shared_target,
)
from steelyard.modifiers.targets import Target

__all__ = ["QuantizationModifier"]

_VALUES = {"weights": "weight", "input_activations": "input", "output_activations": "output"}


@Modifier.register("QuantizationModifier")
class QuantizationModifier(Modifier):
    """Quantize weights, activations and the KV cache with the scales that observers compute.

    Set one of `scheme` and `config_groups`, or `kv_cache_scheme` alone.
    """

    algorithm: ClassVar[str] = "nearest"
    _ways: ClassVar[tuple[str, ...]] = ("scheme", "config_groups")

    scheme: str | dict[str, list[Target]] | None = Field(
        default=None,
        description="a preset of compressed-tensors such as W4A16, or presets with their targets",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="columns that share a scale, for integer presets with groups such as W4A16",
    )
    num_bits: int | None = Field(
        default=None,
        ge=2,
        le=8,
        description="bits of a weight, for presets with integer weights such as W4A16",
    )
    config_groups: dict[str, QuantizationScheme] | None = None
    kv_cache_scheme: QuantizationArgs | None = None
    weight_observer: ObserverChoice | None = None
    input_observer: ObserverChoice | None = None
    output_observer: ObserverChoice | None = None
    activation_observer: ObserverChoice | None = Field(
        default=None, description="for inputs, outputs and attention states alike"
    )
    observer: dict[str, ObserverChoice] | None = Field(
        default=None, description="all three at once: weights, input, output"
    )
    bypass_divisibility_checks: bool = False

    @model_validator(mode="before")
    @classmethod
    def _default_observers(cls, data: Any) -> Any:
        """Fill in the defaults before compressed-tensors fills in its own."""
        if not isinstance(data, Mapping):
            return data
        filled = with_default(data, "kv_cache_scheme", "k")
        groups = data.get("config_groups")
        if isinstance(groups, Mapping):
            for field, base_name in _VALUES.items():
                groups = {k: with_default(v, field, base_name) for k, v in groups.items()}
            filled = {**filled, "config_groups": groups}
        return filled

    @field_validator("scheme", mode="before")
    @classmethod
    def _is_a_preset(cls, value: Any) -> Any:
        names = [value] if isinstance(value, str) else value if isinstance(value, dict) else ()
        for name in names:
            if isinstance(name, str) and not is_preset_scheme(name):
                raise ValueError(
                    f"there is no scheme {name!r}: {nearest(name.upper(), PRESET_SCHEMES)}"
                )
        if isinstance(value, dict):
            return {k: [v] if isinstance(v, str) else v for k, v in value.items()}
        return value

    @field_validator("config_groups")
    @classmethod
    def _groups_are_apart(
        cls, value: dict[str, QuantizationScheme] | None
    ) -> dict[str, QuantizationScheme] | None:
        for name, scheme in (value or {}).items():
            for problem in scheme_problems(scheme):
                raise RecipeError(f"{name}.{problem}")
        _refuse_shared({name: scheme.targets for name, scheme in (value or {}).items()})
        return value

    @field_validator("scheme")
    @classmethod
    def _presets_are_apart(
        cls, value: str | dict[str, list[str]] | None
    ) -> str | dict[str, list[str]] | None:
        if isinstance(value, dict):
            _refuse_shared(value)
        return value

    @field_validator("kv_cache_scheme")
    @classmethod
    def _can_be_stored(cls, value: QuantizationArgs | None) -> QuantizationArgs | None:
        if value is not None and (problem := args_problem(value)):
            raise RecipeError(f"num_bits: {problem}")
        return value

    @field_validator("observer")
    @classmethod
    def _names_a_value(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for key in value or ():
            if key not in ("weights", "input", "output"):
                raise ValueError(
                    f"observer has no key {key!r}: {nearest(key, ('weights', 'input', 'output'))}"
                )
        return value

    @model_validator(mode="after")
    def _is_complete(self) -> QuantizationModifier:
        self._says_how()
        return self

    def _says_how(self) -> None:
        if self.scheme is not None and self.config_groups is not None:
            raise ValueError("give either scheme or config_groups, not both")
        self._refuse_idle_targets()
        self._refuse_idle_changes()
        self._refuse_two_observers()
        if not self._groups() and self.kv_cache_scheme is None:
            raise ValueError(f"give one of {', '.join(self._ways)} and kv_cache_scheme")
        self.config  # noqa: B018  # raise its errors now

    def _refuse_idle_targets(self) -> None:
        if isinstance(self.scheme, str) or self.targets == ["Linear"]:
            return
        if isinstance(self.scheme, dict):
            remedy = "write them after the presets in scheme"
        elif self.config_groups is not None:
            remedy = "write them into the config_groups"
        else:
            remedy = "kv_cache_scheme alone has none"
        raise ValueError(f"targets needs a single preset as the scheme: {remedy}")

    def _refuse_idle_changes(self) -> None:
        for option, problem_of in CHANGES.items():
            if getattr(self, option) is None:
                continue
            if self.scheme is None:
                raise ValueError(
                    f"{option} needs a preset as the scheme: write it into the weights of "
                    "config_groups"
                )
            for name in [self.scheme] if isinstance(self.scheme, str) else self.scheme:
                if problem := problem_of(name):
                    raise ValueError(f"{option} {problem}")

    def _refuse_two_observers(self) -> None:
        chosen = [f"observer.{key}" for key in self.observer or ()]
        fields = ("weight_observer", "input_observer", "output_observer", "activation_observer")
        chosen += [name for name in fields if getattr(self, name) is not None]
        for one, other in (
            ("input_observer", "activation_observer"),
            ("output_observer", "activation_observer"),
            ("observer.weights", "weight_observer"),
            ("observer.input", "input_observer"),
            ("observer.input", "activation_observer"),
            ("observer.output", "output_observer"),
            ("observer.output", "activation_observer"),
        ):
            if one in chosen and other in chosen:
                raise ValueError(f"{one} and {other} set the same observer: give one of them")

    def _groups(self) -> dict[str, QuantizationScheme]:
        """Return the schemes that the options name, before observers are chosen."""
        if self.scheme is None:
            return dict(self.config_groups or {})
        by_name = {self.scheme: self.targets} if isinstance(self.scheme, str) else self.scheme
        return {
            f"group_{i}": changed_preset(_preset(name, targets), self.group_size, self.num_bits)
            for i, (name, targets) in enumerate(by_name.items())
        }

    @cached_property
    def config(self) -> QuantizationConfig:
        choices = self._choices()
        groups = {name: with_observers(s, *choices) for name, s in self._groups().items()}
        return QuantizationConfig(
            config_groups=groups,
            kv_cache_scheme=self._kv_cache_args(),
            quantization_status=QuantizationStatus.INITIALIZED,
            ignore=self.ignore,
        )

    def quantization_config(self) -> QuantizationConfig:
        return self.config

    @property
    def allows_padding(self) -> bool:
        return self.bypass_divisibility_checks

    def doubts(self, plan: Any, model: Any) -> Iterator[str]:
        yield from self.idle_observers()

    def idle_observers(self) -> Iterator[str]:
        """Yield a warning for every chosen observer that will observe nothing."""
        schemes = self.config.config_groups.values()
        values = {
            "weights": [s.weights for s in schemes],
            "input": [s.input_activations for s in schemes],
            "output": [s.output_activations for s in schemes],
        }
        cache = [self.config.kv_cache_scheme]
        chosen = {
            "weight_observer": (self.weight_observer, values["weights"]),
            "input_observer": (self.input_observer, values["input"]),
            "output_observer": (self.output_observer, values["output"]),
            "activation_observer": (
                self.activation_observer,
                [*values["input"], *values["output"], *cache],
            ),
            **{f"observer.{k}": (v, values[k]) for k, v in (self.observer or {}).items()},
        }
        for name, (choice, args) in chosen.items():
            present = [each for each in args if each is not None]
            if choice is None or any(each.dynamic is not True for each in present):
                continue
            why = (
                "its scales are computed while serving (dynamic), so nothing is observed; "
                "for static ones choose a scheme such as FP8, or write config_groups"
                if present
                else "the scheme does not quantize the values that it would observe"
            )
            yield f"{name} {choice.name!r} has no effect: {why}"

    def _choices(self) -> list[ObserverChoice | None]:
        both = self.observer or {}
        return [
            both.get("weights", self.weight_observer),
            both.get("input", self.input_observer or self.activation_observer),
            both.get("output", self.output_observer or self.activation_observer),
        ]

    def _kv_cache_args(self) -> QuantizationArgs | None:
        return observed(self.kv_cache_scheme, self.activation_observer, "k")


def _preset(name: str, targets: list[str]) -> QuantizationScheme:
    """Return a preset without its observers; only that of a global scale stays."""
    scheme = preset_name_to_scheme(name, targets)
    unset: dict[str, Any] = {"observer": None, "observer_kwargs": {}}
    fields = {
        field: args.model_copy(update=unset)
        for field in _VALUES
        if (args := getattr(scheme, field)) is not None
        and (field == "weights" or args.strategy == "tensor")
    }
    return scheme.model_copy(update=fields)


def _refuse_shared(targets: dict[str, list[str]]) -> None:
    if shared := shared_target(targets):
        one, other, target = shared
        raise ValueError(
            f"{one!r} and {other!r} both target {target!r}: remove it from one of them, or make "
            "the targets differ"
        )
