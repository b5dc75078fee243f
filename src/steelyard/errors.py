"""All errors that the package raises, each a subclass of the built-in that a caller would catch.

A message names the tensor or file, its value and the remedy. Defects of the package surface as
plain Python errors and are not listed here.
"""

from __future__ import annotations

import difflib
import sys
import warnings
from collections.abc import Iterable

from steelyard.foreign import printable

__all__ = [
    "CalibrationError",
    "CalibrationWarning",
    "CheckpointError",
    "CheckpointInvalid",
    "DataError",
    "FusionError",
    "ImportanceError",
    "ImportanceUnsupported",
    "ImportanceWarning",
    "NoStatisticsError",
    "NonFiniteError",
    "OptionError",
    "OutputError",
    "PipelineError",
    "PlanError",
    "PluginError",
    "RanksError",
    "RecipeError",
    "ReportError",
    "StatisticsError",
    "SteelyardError",
    "StrategyError",
    "UnknownNameError",
    "nearest",
    "warn_caller",
]


class SteelyardError(Exception):
    """Base of all errors that this package raises on purpose.

    Messages quote foreign names, so characters that a terminal would act on are escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class NoStatisticsError(SteelyardError, AssertionError):
    """Quantization parameters were requested from an observer without statistics."""


class NonFiniteError(SteelyardError, ValueError):
    """An observed tensor holds NaN or infinity."""


class StrategyError(SteelyardError, ValueError):
    """A strategy that does not fit the tensor or the type."""


class OptionError(SteelyardError, ValueError):
    """An observer option that is unknown or out of range."""


class FusionError(SteelyardError, ValueError):
    """Layers that the server fuses, but that have different schemes."""


class StatisticsError(SteelyardError, ValueError):
    """Statistics that cannot be merged, saved or loaded."""


class ImportanceError(SteelyardError, ValueError):
    """Importance is unusable and `strict=True` forbids continuing without it."""


class ImportanceUnsupported(ImportanceError, NotImplementedError):
    """Importance for a strategy or a module that cannot use it."""


class ImportanceWarning(UserWarning):
    """Importance is unusable; the search weights all columns equally."""


class CalibrationWarning(UserWarning):
    """Far too little calibration data."""


class RecipeError(SteelyardError, ValueError):
    """An invalid recipe."""


class PluginError(SteelyardError, ImportError):
    """A user's own file that cannot be imported."""


class PlanError(SteelyardError, ValueError):
    """A recipe that does not fit the model; raised before any work."""


class RanksError(SteelyardError, RuntimeError):
    """Another rank of the run failed, died or hangs; the message says which and why."""


class DataError(SteelyardError, ValueError):
    """Calibration data that is missing or cannot be read."""


class CalibrationError(SteelyardError, RuntimeError):
    """Modules that calibration did not reach."""


class PipelineError(SteelyardError, RuntimeError):
    """A model that cannot run as requested."""


class CheckpointError(SteelyardError, ValueError):
    """A checkpoint that cannot be read or written, or whose content is wrong."""


class CheckpointInvalid(CheckpointError):
    """A written checkpoint that must not be served."""


class OutputError(SteelyardError, OSError):
    """A result file that could not be written; the run can be resumed."""


class ReportError(SteelyardError, ValueError):
    """A report that cannot be read or written."""


class UnknownNameError(SteelyardError, KeyError, ValueError):
    """A name that is not registered."""

    def __str__(self) -> str:  # KeyError would print the message in quotes
        return printable(str(self.args[0]), keep="\n")


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a clause that suggests the known name nearest to `name`, or lists all of them.

    >>> nearest("memoryles_mse", ["memoryless_mse", "minmax"])
    "did you mean 'memoryless_mse'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"known: {', '.join(known) or 'none'}"


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn at the line of the user's code that called into this package."""
    package, level, frame = __name__.partition(".")[0], 1, sys._getframe()
    while frame.f_back and frame.f_globals.get("__name__", "").split(".")[0] == package:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
