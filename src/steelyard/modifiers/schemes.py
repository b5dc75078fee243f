"""Checks of schemes that need no model.

compressed-tensors accepts any number of bits and any text as a target; without these checks, a
scheme that cannot be stored or matched would fail in the middle of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)

from steelyard.errors import StrategyError
from steelyard.modifiers.targets import check_target
from steelyard.observers.type_checks import check_type

__all__ = [
    "CHANGES",
    "args_problem",
    "changed_preset",
    "group_size_problem",
    "has_free_groups",
    "num_bits_problem",
    "scheme_problems",
    "shared_target",
    "target_problem",
]


def target_problem(target: str) -> str | None:
    """Return why `target` can match nothing."""
    try:
        check_target(target)
    except ValueError as error:
        return str(error)
    return None


def args_problem(args: QuantizationArgs) -> str | None:
    """Return the problem with the number of bits, if any."""
    try:
        check_type(args.model_copy(update={"symmetric": True, "scale_dtype": None}))
    except StrategyError as error:
        return str(error)
    return None


def has_free_groups(args: QuantizationArgs | None) -> bool:
    """Whether the group size is free: integer groups, unlike those of NVFP4 and MX."""
    return args is not None and args.strategy == "group" and args.type == "int"


def group_size_problem(preset: str) -> str | None:
    """Return why the groups of a preset cannot have another size.

    >>> group_size_problem("NVFP4A16")
    'does not apply to NVFP4A16, whose groups are fixed or missing'
    """
    if has_free_groups(preset_name_to_scheme(preset, ["Linear"]).weights):
        return None
    return f"does not apply to {preset}, whose groups are fixed or missing"


def num_bits_problem(preset: str) -> str | None:
    """Return why the weights of a preset cannot have another number of bits.

    >>> num_bits_problem("FP8")
    'does not apply to FP8, whose weights are not integers'
    """
    weights = preset_name_to_scheme(preset, ["Linear"]).weights
    if weights is not None and weights.type == "int":
        return None
    return f"does not apply to {preset}, whose weights are not integers"


CHANGES = {"group_size": group_size_problem, "num_bits": num_bits_problem}
"""What may be changed in the weights of a preset -> why it cannot be, for a preset."""


def changed_preset(
    scheme: QuantizationScheme, group_size: int | None, num_bits: int | None
) -> QuantizationScheme:
    """Return a preset's scheme with other groups or bits for its weights; None keeps them."""
    asked = {"group_size": group_size, "num_bits": num_bits}
    changes = {name: value for name, value in asked.items() if value is not None}
    if not changes or scheme.weights is None:
        return scheme
    return scheme.model_copy(update={"weights": scheme.weights.model_copy(update=changes)})


def scheme_problems(scheme: QuantizationScheme) -> Iterator[str]:
    """Yield the problems of a scheme, each with its key."""
    for i, target in enumerate(scheme.targets):
        if problem := target_problem(target):
            yield f"targets[{i}]: {problem}"
    for name in ("weights", "input_activations", "output_activations"):
        args = getattr(scheme, name)
        if args is not None and (problem := args_problem(args)):
            yield f"{name}.num_bits: {problem}"


def shared_target(targets: Mapping[str, list[str]]) -> tuple[str, str, str] | None:
    """Return two groups and a target that both name, or None.

    >>> shared_target({"a": ["Linear"], "b": ["re:.*proj", "Linear"]})
    ('a', 'b', 'Linear')
    """
    owner: dict[str, str] = {}
    for group, named in targets.items():
        for target in named:
            if owner.setdefault(target, group) != group:
                return owner[target], group, target
    return None
