"""One name has one meaning: files and classes of the package do not share names."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"

# A modifier's options and the algorithm that uses them have the same name, and the same meaning.
PAIRED = {"algorithms", "modifiers"}
SAME_MEANING = {"_Strict": "the base of records that refuse unknown fields, in each file"}


def places(paths: Iterable[Path], root: Path) -> dict[str, list[str]]:
    """Return the files and classes under each name, without pairs of modifier and algorithm.

    A file is listed by its path, a class by its path and name.
    """
    found: dict[str, list[Path]] = defaultdict(list)
    for path in paths:
        if path.name != "__init__.py":
            found[path.name].append(path)
        for node in ast.parse(path.read_text("utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(path)
    return {
        name: [str(path.relative_to(root)) for path in owners]
        for name, owners in found.items()
        if {path.relative_to(root).parts[0] for path in owners} != PAIRED or len(owners) > 2
    }


def shared_names(root: Path) -> dict[str, list[str]]:
    """Return the names that more than one file or class has."""
    found = places(sorted(root.rglob("*.py")), root)
    return {name: owners for name, owners in found.items() if len(owners) > 1}


def test_files_and_classes_have_names_of_their_own() -> None:
    shared = shared_names(SOURCE)
    assert {name: owners for name, owners in shared.items() if name not in SAME_MEANING} == {}
    assert set(SAME_MEANING) <= set(shared), "no longer shared: remove it from the list"


def test_shared_names_are_found(tmp_path: Path) -> None:
    for package in ("algorithms", "modifiers", "report", "data"):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").touch()
    for package in ("algorithms", "modifiers"):
        (tmp_path / package / "gptq.py").write_text("class GPTQ: ...\n")
    assert shared_names(tmp_path) == {}
    (tmp_path / "data" / "rows.py").write_text("class Rows: ...\nclass Source: ...\n")
    (tmp_path / "report" / "rows.py").write_text("class Source: ...\n")
    (tmp_path / "report" / "gptq.py").touch()
    assert shared_names(tmp_path) == {
        "rows.py": ["data/rows.py", "report/rows.py"],
        "Source": ["data/rows.py", "report/rows.py"],
        "gptq.py": ["algorithms/gptq.py", "modifiers/gptq.py", "report/gptq.py"],
    }
