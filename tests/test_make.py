"""Targets of the Makefile, as `make -n` tells what they would run from nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def steps(target: str, environment: Path) -> str:
    command = ["make", "-n", f"VENV={environment}", f"OLDEST={environment}-oldest", target]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout


def test_the_demo_installs_the_package_alone(tmp_path: Path) -> None:
    said = steps("demo", tmp_path / "venv")
    assert "-e '.'" in said and "steelyard demo" in said
    assert "dev" not in said


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_and_checks_add_their_tools(target: str, tmp_path: Path) -> None:
    said = steps(target, tmp_path / "venv")
    assert said.index("-e '.'") < said.index("-r ")
    assert "dev.txt" in said
