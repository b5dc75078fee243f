"""Every error a user can meet, each a subclass of the built-in that a caller would catch.

A message names the thing, its value and the remedy. Programming mistakes inside the package are
plain Python errors and are not listed here.
"""

from __future__ import annotations

import difflib
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
    "RanksError",
    "RecipeError",
    "ReportError",
    "StatisticsError",
    "SteelyardError",
    "StrategyError",
    "UnknownNameError",
    "nearest",
]


class SteelyardError(Exception):
    """Base of all errors that this package raises on purpose.

    Messages quote names that others chose, so what would act on a terminal is escaped.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n")


class NoStatisticsError(SteelyardError, AssertionError):
    """Parameters were asked of an observer that has seen nothing."""


class NonFiniteError(SteelyardError, ValueError):
    """An observed tensor holds NaN or infinity."""


class StrategyError(SteelyardError, ValueError):
    """A tensor, a strategy and a type that do not go together."""


class OptionError(SteelyardError, ValueError):
    """An observer option that is unknown or out of range."""


class FusionError(SteelyardError, ValueError):
    """Layers that the server fuses, but that are quantized differently."""


class StatisticsError(SteelyardError, ValueError):
    """Statistics that cannot be merged, saved or loaded."""


class ImportanceError(SteelyardError, ValueError):
    """Importance is unusable and `strict=True` forbids going on without it."""


class ImportanceUnsupported(ImportanceError, NotImplementedError):
    """Importance that a strategy or a place cannot use."""


class ImportanceWarning(UserWarning):
    """Importance is unusable; the search weighs every column alike."""


class CalibrationWarning(UserWarning):
    """Calibration data that is far too little."""


class RecipeError(SteelyardError, ValueError):
    """A recipe that cannot be understood."""


class PlanError(SteelyardError, ValueError):
    """A recipe that does not fit the model; nothing was done."""


class RanksError(SteelyardError, RuntimeError):
    """Another rank of the run failed, died or hangs; says which and why."""


class DataError(SteelyardError, ValueError):
    """Calibration data that is missing or cannot be read."""


class CalibrationError(SteelyardError, RuntimeError):
    """Modules that calibration did not reach."""


class PipelineError(SteelyardError, RuntimeError):
    """A model that cannot be run the way that was asked for."""


class CheckpointError(SteelyardError, ValueError):
    """A checkpoint that cannot be read or written, or that is not what it should be."""


class CheckpointInvalid(CheckpointError):
    """A written checkpoint that must not be served."""


class OutputError(SteelyardError, OSError):
    """A file of results that could not be written; the run that made them can be resumed."""


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
