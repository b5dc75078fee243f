"""Every run of the tests has a temporary folder of its own, and keeps it only for a failure."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment_with

TESTS = Path(__file__).parent
EXAMPLE = """
def test_example(tmp_path):
    (tmp_path / "file").touch()
    assert {passes}
"""


@pytest.mark.parametrize(("passes", "workers"), [(True, 2), (False, 0)])
def test_temporary_folder(passes: bool, workers: int, tmp_path: Path) -> None:
    temporary, examples = tmp_path / "temporary", tmp_path / "examples"
    temporary.mkdir()
    examples.mkdir()
    shutil.copy(TESTS / "conftest.py", examples)
    (examples / "test_example.py").write_text(EXAMPLE.format(passes=passes))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n", str(workers), examples],
        env=environment_with(TMPDIR=str(temporary), PYTEST_ADDOPTS=""),
        capture_output=True,
        text=True,
    )
    assert done.returncode == (0 if passes else 1), done.stdout + done.stderr
    assert not list(temporary.glob("pytest-of-*"))  # which all runs would share
    assert len(list(temporary.rglob("file"))) == (0 if passes else 1)
    assert len(list(temporary.iterdir())) == (0 if passes else 1)
