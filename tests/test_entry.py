"""The public `oneshot`: its options, and what a type checker says of a call."""

from __future__ import annotations

import ast
import inspect
import itertools
from dataclasses import MISSING, FrozenInstanceError, fields
from pathlib import Path

import pytest
from mypy import api

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


@pytest.mark.parametrize(
    ("call", "complaint"),
    [
        ('oneshot("m", recpie="x")', 'Unexpected keyword argument "recpie"'),
        ('oneshot("m", "x", batch_size="two")', 'has incompatible type "str"; expected "int"'),
        ('oneshot("m", "x", "data", "out", seed=1)', None),
    ],
)
def test_type_checker(call: str, complaint: str | None, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(f"from steelyard import oneshot\n\n{call}\n")
    cache = str(Path(__file__).parents[1] / ".mypy_cache")
    out, err, code = api.run([str(script), "--cache-dir", cache, "--follow-imports=silent"])
    if complaint is None:
        assert code == 0, out + err
    else:
        assert code == 1 and complaint in out, out + err
