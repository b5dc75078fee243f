"""The public `oneshot`: its options, and what a type checker says of a call."""

from __future__ import annotations

import ast
import inspect
import itertools
import subprocess
import sys
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest

import steelyard
from steelyard.engine import run_options
from steelyard.engine.run_options import Options


def test_oneshot_takes_the_options_of_a_run() -> None:
    taken = inspect.signature(steelyard.oneshot).parameters
    known = {field.name: field for field in fields(Options)}
    assert list(taken) == list(known)
    for name, parameter in taken.items():
        assert parameter.annotation == known[name].type
        default = inspect.Parameter.empty if known[name].default is MISSING else known[name].default
        assert parameter.default == default


def test_every_option_has_a_docstring() -> None:
    tree = ast.parse(inspect.getsource(run_options))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef))
    documented = {
        before.target.id
        for before, after in itertools.pairwise(body)
        if isinstance(before, ast.AnnAssign)
        and isinstance(before.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }
    assert documented == {field.name for field in fields(Options)}


def test_options_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        Options(model="m").seed = 1  # type: ignore[misc]


def test_type_checker_refuses_misspelt_options_and_wrong_types(tmp_path: Path) -> None:
    """In a process of its own: mypy changes Python's limits."""
    script = tmp_path / "script.py"
    calls = ['"m", recpie="x"', '"m", "x", batch_size="two"', '"m", "x", "data", "out", seed=1']
    lines = ["from steelyard import oneshot", *(f"oneshot({call})" for call in calls)]
    script.write_text("\n".join(lines))
    found = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", str(script)],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=Path(__file__).parents[1],  # with the settings and the cache of `make check`
    )
    errors = [line for line in found.stdout.splitlines() if ": error: " in line]
    first, second = errors
    assert "script.py:2:" in first and 'Unexpected keyword argument "recpie"' in first
    assert "script.py:3:" in second and 'has incompatible type "str"; expected "int"' in second
