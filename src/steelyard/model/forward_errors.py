"""Reports exceptions of a model's own forward as failures of that model, not of this package."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from steelyard.errors import PipelineError, SteelyardError
from steelyard.foreign import LONGEST, printable

__all__ = ["WITHOUT_DATA", "forward_errors"]

WITHOUT_DATA = (
    "a scheme that needs no calibration data, such as FP8_DYNAMIC, works from the files alone"
)
_PACKAGE = str(Path(__file__).parents[1])
_STUBS = str(Path(__file__).with_name("blocks.py"))  # layers are called through it


@contextlib.contextmanager
def forward_errors(
    model: Any, where: str, remedy: str, passing: type[Exception] = SteelyardError
) -> Iterator[None]:
    """Turn an exception of the model's code into a PipelineError.

    Our own errors and out-of-memory errors pass unchanged.

    where:   the modules that run, for the message
    remedy:  a clause of the message
    passing: other exceptions that pass unchanged
    """
    try:
        yield
    except (SteelyardError, MemoryError, torch.OutOfMemoryError, passing):
        raise
    except Exception as error:
        if _is_ours(error):
            raise
        said = printable(" ".join(str(error).split()))[:LONGEST].rstrip(".")
        raise PipelineError(
            f"{type(model).__name__} cannot be calibrated: its own forward fails in {where} "
            f"({type(error).__name__}: {said}); {remedy}"
        ) from error


def _is_ours(error: Exception) -> bool:
    """Whether code of this package, such as an observer, raised the error inside the forward."""
    frames = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    frames = [name for name in frames if name != _STUBS]
    entered = next((i for i, name in enumerate(frames) if not name.startswith(_PACKAGE)), None)
    return entered is None or any(name.startswith(_PACKAGE) for name in frames[entered:])
