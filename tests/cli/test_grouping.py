"""Names that differ only in numbers share a line."""

from __future__ import annotations

import pytest

from steelyard.cli.grouping import joined_lines, matching
from steelyard.model.module_names import grouped


def labels(names: list[str]) -> list[str]:
    return [label for label, _ in grouped(names, str, lambda name: None)]


def test_numbers_become_ranges() -> None:
    names = [f"m.{i}.q" for i in (0, 1, 2, 5, 7, 8)] + ["head"]
    assert labels(names) == ["m.{0-2,5,7,8}.q", "head"]
    assert labels([f"m.{i}.e.{j}.up" for i in range(4) for j in range(3)]) == ["m.{0-3}.e.{0-2}.up"]
    assert labels(["m.3.e.0.up", "m.3.e.1.up"]) == ["m.3.e.{0-1}.up"]
    assert labels(["w1", "w2", "a.w1"]) == ["w1", "w2", "a.w1"], "no whole parts"


def test_what_is_not_alike_stays_apart() -> None:
    names = ["m.0.q", "m.1.q", "m.2.q"]
    found = grouped(names, str, lambda name: name == "m.1.q")
    assert found == [("m.{0,2}.q", ["m.0.q", "m.2.q"]), ("m.1.q", ["m.1.q"])]


def test_joined_lines() -> None:
    text = "head:\n  - a.0.x: too long\n  - a.1.x: too long\n  - a.2.x: too wide\n  - b: too long"
    assert joined_lines(text).split("\n") == [
        "head:",
        "  - a.{0-1}.x: too long (2 modules)",
        "  - a.2.x: too wide",
        "  - b: too long",
    ]
    problems = "problem: a.0.x is missing\nproblem: a.1.x is missing"
    assert joined_lines(problems) == "problem: a.{0-1}.x is missing (2 modules)"
    same = "error: no\nerror: no\nwarning: model.layers.0.x is odd"
    assert joined_lines(same) == same


@pytest.mark.parametrize(
    ("pattern", "wanted"),
    [
        (None, {"a.q_proj", "a.k_proj", "b"}),
        ("proj", {"a.q_proj", "a.k_proj"}),
        ("a.?_proj", {"a.q_proj", "a.k_proj"}),
        ("*q_proj", {"a.q_proj"}),
        ("q_*", set()),
        ("re:.*[qv]_proj$", {"a.q_proj"}),
        ("re:b|a.k", {"a.k_proj", "b"}),
    ],
)
def test_matching(pattern: str | None, wanted: set[str]) -> None:
    keep = matching(pattern)
    assert {name for name in ("a.q_proj", "a.k_proj", "b") if keep(name)} == wanted
