"""Builds a modifier from options, or lists all problems with them.

A modifier is a pydantic model that holds models of compressed-tensors. Pydantic does not collect
all of their errors, and checks nested values (observers, targets, numbers of bits) only once the
rest is valid. So an option that fails is searched for the problems that the first one hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from pydantic import BaseModel, ValidationError

from steelyard.errors import OptionError, RecipeError, UnknownNameError
from steelyard.modifiers.fields import Model, nested_models
from steelyard.modifiers.locate import KeyPath, Problem, RecipeText
from steelyard.modifiers.modifier import Modifier
from steelyard.modifiers.observer_choice import ObserverChoice
from steelyard.modifiers.schemes import args_problem, target_problem
from steelyard.modifiers.wording import KINDS, first_line, got, reworded
from steelyard.observers import Observer

__all__ = ["check_options", "refusal"]


def check_options(
    modifier: type[Modifier], options: Mapping[Any, Any], path: KeyPath
) -> Modifier | list[Problem]:
    """Return the modifier that `options` describe, or all problems with them."""
    inside = list(_inner_problems(modifier, options, path))
    try:
        made = modifier.model_validate(options)
    except ValidationError as error:
        collected = error.errors()
        if inside:  # reported at its own place, not where it was looked up
            collected = [e for e in collected if not _is_reported_inside(e)]
        return reworded(collected, modifier, options, path) + inside
    except Exception as error:
        return _blame(modifier, options, path, error) + inside
    return inside + list(_converted(options, made, path)) or made


def refusal(modifier: type[Modifier], options: Mapping[str, Any], error: Exception) -> RecipeError:
    """Return the error for a modifier constructed in Python, located by its class name."""
    name = modifier.__name__
    problems = check_options(modifier, options, (name,))
    if isinstance(problems, Modifier):  # the call is wrong: a positional argument
        return RecipeError(f"{name}: {first_line(error)}")
    return RecipeText({name: options}).refuse(problems)


# -- errors that pydantic does not collect ----------------------------------------------------


def _blame(model: Model, given: Any, path: KeyPath, error: Exception) -> list[Problem]:
    """Find the smallest parts of `given` that are invalid."""
    inner = [
        problem
        for at, nested, value in nested_models(model, given)
        for problem in _problems(nested, value, (*path, *at))
    ]
    if inner or not isinstance(given, Mapping):
        return inner or [(path, _raised(error, given))]
    alone = [
        ((*path, key), _raised(raised, value))
        for key, value in given.items()
        if (raised := _raises(model, {key: value})) is not None
    ]
    return alone or [(path, _raised(error, given))]


def _problems(model: Model, given: Any, path: KeyPath) -> list[Problem]:
    try:
        model.model_validate(given)
    except ValidationError as error:
        return reworded(error.errors(), model, given, path)
    except Exception as error:
        return _blame(model, given, path, error)
    return []


def _raises(model: Model, given: Mapping[Any, Any]) -> Exception | None:
    try:
        model.model_validate(given)
    except ValidationError:
        return None
    except Exception as error:
        return error
    return None


def _raised(error: Exception, given: Any) -> str:
    if isinstance(error, (TypeError, AttributeError)):  # raised by a validator on this type
        return f"is of the wrong type, {got(given)}"
    text = first_line(error)
    return text if isinstance(given, Mapping) else f"{text}, {got(given)}"


# -- nested values ----------------------------------------------------------------------------


def _is_reported_inside(error: Any) -> bool:
    raised = error.get("ctx", {}).get("error")
    return isinstance(raised, (OptionError, UnknownNameError, RecipeError))


def _inner_problems(model: Model, given: Any, path: KeyPath) -> Iterator[Problem]:
    """Check every observer, target and number of bits inside `given`."""
    for at, nested, value in nested_models(model, given):
        here = (*path, *at)
        if nested is ObserverChoice and isinstance(value, str):
            yield from _observer(value, {}, here, here)
        elif nested is ObserverChoice and isinstance(value, Mapping) and "options" in value:
            yield from _observer(
                value.get("name"), value["options"], (*here, "name"), (*here, "options")
            )
        elif nested is ObserverChoice and isinstance(value, Mapping):
            options = {key: option for key, option in value.items() if key != "name"}
            yield from _observer(value.get("name"), options, (*here, "name"), here)
        elif nested is QuantizationArgs and isinstance(value, Mapping):
            yield from _observer(
                value.get("observer"),
                value.get("observer_kwargs") or {},
                (*here, "observer"),
                (*here, "observer_kwargs"),
            )
            yield from _bits(value, (*here, "num_bits"))
        else:
            if nested is QuantizationScheme and isinstance(value, Mapping):
                yield from _targets(value.get("targets"), (*here, "targets"))
            yield from _inner_problems(nested, value, here)


def _bits(given: Mapping[Any, Any], path: KeyPath) -> Iterator[Problem]:
    try:
        args = QuantizationArgs.model_validate(given)
    except Exception:  # reported when the whole is validated
        return
    if problem := args_problem(args):
        bits = given.get("num_bits")
        yield path, problem if type(bits) is int else f"must be {KINDS['int']}, {got(bits)}"


def _targets(given: Any, path: KeyPath) -> Iterator[Problem]:
    for i, target in enumerate(given if isinstance(given, list) else ()):
        if isinstance(target, str) and (problem := target_problem(target)):
            yield (*path, i), problem


def _observer(name: Any, options: Any, name_at: KeyPath, options_at: KeyPath) -> Iterator[Problem]:
    if not isinstance(name, str) or not isinstance(options, Mapping):
        return  # the model reports it
    try:
        declared = Observer.get_value_from_registry(name).Options
    except UnknownNameError as error:
        yield name_at, str(error)
        return
    if declared is not None:
        yield from _problems(declared, options, options_at)


# -- values that pydantic converts ------------------------------------------------------------


def _converted(given: Any, made: Any, path: KeyPath) -> Iterator[Problem]:
    """Refuse values that pydantic converts: `"4"` or `true` for a number, `1` for true."""
    if isinstance(given, Mapping) and isinstance(made, (BaseModel, Mapping)):
        stored = made.__dict__ if isinstance(made, BaseModel) else made
        for key, value in given.items():
            if key in stored:
                yield from _converted(value, stored[key], (*path, key))
    elif isinstance(given, list) and isinstance(made, list) and len(given) == len(made):
        for i, (value, stored) in enumerate(zip(given, made, strict=True)):
            yield from _converted(value, stored, (*path, i))
    elif isinstance(given, (str, int, float)) and isinstance(made, (bool, int, float)):
        same = type(given) is type(made) or not (
            isinstance(given, (str, bool)) or isinstance(made, bool)
        )
        if not same:
            yield path, f"must be {KINDS[type(made).__name__]}, {got(given)}"
