"""What a recipe calls modules by: a name, a class name, or `re:` and a regular expression."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

__all__ = ["Target", "check_target"]


def check_target(target: str) -> str:
    """Return `target`; refuse a regular expression that is none."""
    if target.startswith("re:"):
        try:
            re.compile(target.removeprefix("re:"))
        except (re.error, RecursionError, OverflowError) as error:
            raise ValueError(f"{target!r} is not a regular expression: {error}") from None
    return target


Target = Annotated[str, AfterValidator(check_target)]
