"""Targets of a recipe: a module name, a class name, or `re:` and a regular expression."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator

from steelyard.checkpoint.patterns import problem_of

__all__ = ["Target", "check_target"]


def check_target(target: str) -> str:
    """Return `target`; raise if it is an invalid regular expression."""
    if problem := problem_of(target):
        raise ValueError(problem)
    return target


Target = Annotated[str, AfterValidator(check_target)]
