"""Errors: each is caught by the built-in a caller would write, and suggests what was meant."""

from __future__ import annotations

import pickle

import pytest

from steelyard import errors

BUILT_IN = {
    "CalibrationError": RuntimeError,
    "CheckpointError": ValueError,
    "DataError": ValueError,
    "FusionError": ValueError,
    "ImportanceError": ValueError,
    "NoStatisticsError": AssertionError,
    "NonFiniteError": ValueError,
    "OptionError": ValueError,
    "OutputError": OSError,
    "PipelineError": RuntimeError,
    "PlanError": ValueError,
    "PluginError": ImportError,
    "RanksError": RuntimeError,
    "RecipeError": ValueError,
    "ReportError": ValueError,
    "StatisticsError": ValueError,
    "StrategyError": ValueError,
    "UnknownNameError": KeyError,
}


@pytest.mark.parametrize(("name", "built_in"), BUILT_IN.items())
def test_error_is_ours_and_the_built_in(name: str, built_in: type[Exception]) -> None:
    error = getattr(errors, name)
    assert issubclass(error, errors.SteelyardError)
    assert issubclass(error, built_in)


def test_every_error_is_listed_above() -> None:
    named = {name for name in errors.__all__ if name.endswith("Error")}
    assert named == {*BUILT_IN, "SteelyardError"}


def test_importance_warning_is_a_user_warning() -> None:
    assert issubclass(errors.ImportanceWarning, UserWarning)


@pytest.mark.parametrize("name", [*BUILT_IN, "SteelyardError"])
def test_message_is_printed_as_written_and_survives_pickling(name: str) -> None:
    error = getattr(errors, name)("layer 'x' is 3\nset it to 4")
    assert str(error) == "layer 'x' is 3\nset it to 4"
    travelled = pickle.loads(pickle.dumps(error))
    assert (type(travelled), str(travelled)) == (type(error), str(error))


@pytest.mark.parametrize(
    ("name", "clause"),
    [
        ("minmx", "did you mean 'minmax'?"),
        ("memoryless_mse", "did you mean 'memoryless_mse'?"),
        ("memoryles_mse", "did you mean 'memoryless_mse'?"),
        ("q", "known: memoryless_mse, minmax, static"),
        ("", "known: memoryless_mse, minmax, static"),
    ],
)
def test_nearest_suggests_one_or_lists_all(name: str, clause: str) -> None:
    assert errors.nearest(name, {"static", "minmax", "memoryless_mse"}) == clause


def test_nearest_of_nothing() -> None:
    assert errors.nearest("anything", []) == "known: none"
