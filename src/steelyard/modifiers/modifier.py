"""The base class of modifiers: a strict model of options, and a registry of names."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from compressed_tensors.quantization import QuantizationConfig
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from steelyard.formats.served_rotation import ServedRotation
from steelyard.modifiers.targets import Target
from steelyard.registry import Registry

__all__ = ["Modifier"]

if TYPE_CHECKING:
    from pydantic._internal._model_construction import ModelMetaclass
else:
    ModelMetaclass = type(BaseModel)

Class = TypeVar("Class", bound="type[Modifier]")

WRITTEN = ("requires_calibration_data", "batched_quantization")
"""Keys of llm-compressor's own recipes that say nothing which the other options do not."""


class _Refusing(ModelMetaclass):
    """Makes the constructor raise a RecipeError, worded as for a recipe in YAML.

    Not an `__init__`, which pydantic would also call when it validates.
    """

    def __call__(cls, *args: Any, **options: Any) -> Any:
        try:
            return super().__call__(*args, **options)
        except (ValidationError, TypeError, AttributeError) as error:
            from steelyard.modifiers.check import refusal

            raise refusal(cls, options, error) from None  # type: ignore[arg-type]


class Modifier(BaseModel, metaclass=_Refusing):
    """One step of a recipe.

    targets, ignore: module names, class names, or `re:` and a regular expression
    """

    algorithm: ClassVar[str] = ""
    """Registered name of the algorithm that implements this modifier."""
    chooses_schemes: ClassVar[bool] = False
    """Whether it chooses schemes before the run, instead of an algorithm that works in it."""

    model_config = ConfigDict(extra="forbid", arbitrary_types_allowed=True)

    registry: ClassVar[Registry[type[Modifier]]] = Registry("modifier")

    targets: list[Target] = Field(default_factory=lambda: ["Linear"])
    ignore: list[Target] = Field(default_factory=list)

    @model_validator(mode="before")
    @classmethod
    def _without_written_keys(cls, data: Any) -> Any:
        """Drop what llm-compressor writes into recipes and derives again when it reads them."""
        if not isinstance(data, dict):
            return data
        return {key: value for key, value in data.items() if key not in WRITTEN}

    @field_validator("targets", "ignore", mode="before")
    @classmethod
    def _one_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, str) else value

    @classmethod
    def register(cls, name: str) -> Callable[[Class], Class]:
        return Modifier.registry.register(name)  # type: ignore[return-value]

    def quantization_config(self) -> QuantizationConfig | None:
        """Return targets and schemes; None for a modifier that quantizes nothing."""
        return None

    def steps(self) -> list[Modifier]:
        """Return the steps that this one stands for; most are a single step."""
        return [self]

    def candidates(self) -> dict[str, list[Modifier]]:
        """Return what may take the place of this step, by a label each; nothing to keep it.

        With calibration data, the KL divergence of the model is measured under each before the run,
        as the steps that need no data leave it, and rounded. The last takes the place of this step
        unless another is better by more than noise. They have no candidates themselves.
        """
        return {}

    def checks(self, plan: Any, model: Any) -> Iterator[str]:
        """Yield errors of a plan for `model`, one sentence each."""
        return iter(())

    def doubts(self, plan: Any, model: Any) -> Iterator[str]:
        """Yield warnings: the plan runs, but perhaps not as intended."""
        return iter(())

    def patterns(self) -> list[str]:
        """Return all targets and ignores in the options."""
        return [*self.targets, *self.ignore]

    def served_rotations(self) -> list[ServedRotation]:
        """Return rotations that a server applies while the model runs."""
        return []

    @property
    def unties_heads(self) -> bool:
        """Whether output heads that share the embedding's weight get one of their own."""
        return False

    @property
    def allows_padding(self) -> bool:
        """Whether groups and blocks need not divide a weight."""
        return False
