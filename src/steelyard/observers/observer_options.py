"""Observer options as data: each observer declares its own and rejects unknown ones.

A declaration is a pydantic model, so that the recipe schema, the command line and the
documentation read the same names, defaults and bounds that the observer checks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from steelyard.errors import OptionError, nearest

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs

__all__ = ["ActivationOptions", "ObserverOptions", "check_headroom", "parse_options"]


class ObserverOptions(BaseModel):
    """Base of every options declaration; alone, it declares that there are none."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class ActivationOptions(ObserverOptions):
    """Options of observers for activations."""

    headroom: float = Field(
        default=1.0,
        ge=1,
        allow_inf_nan=False,
        description="NVFP4: how far above the largest input observed the global scale reaches",
    )


Declared = TypeVar("Declared", bound=ObserverOptions)


def parse_options(declared: type[Declared], given: Mapping[str, Any], owner: str) -> Declared:
    """Check `given` against a declaration.

    >>> parse_options(SearchOptions, {"maxshrnk": 0.1}, "mse")
    OptionError: mse: unknown option 'maxshrnk': did you mean 'maxshrink'?
    """
    try:
        return declared(**given)
    except ValidationError as error:
        problems = "; ".join(_problem(e, declared) for e in error.errors())
        raise OptionError(f"{owner}: {problems}") from None


def check_headroom(options: Any, base_name: str, args: QuantizationArgs) -> None:
    """Refuse headroom where no global scale of an activation is stored."""
    headroom = getattr(options, "headroom", 1.0)
    if headroom != 1 and (base_name == "weight" or args.strategy != "tensor_group"):
        strategy = getattr(args.strategy, "value", args.strategy)
        raise OptionError(
            f"headroom={headroom:g} has no effect on the {base_name} with strategy {strategy!r}: "
            "only NVFP4's activations have a global scale to leave room in"
        )


def _problem(error: Any, declared: type[ObserverOptions]) -> str:
    name = str(error["loc"][0]) if error["loc"] else ""
    if error["type"] == "extra_forbidden":
        return f"unknown option {name!r}: {nearest(name, declared.model_fields)}"
    if error["type"] == "value_error":  # raised by a declaration's own validator
        return str(error["ctx"]["error"])
    must = str(error["msg"]).replace("Input should be", "must be")
    return f"{name} {must}, got {error['input']!r}"
