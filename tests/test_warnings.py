"""A warning is an error in every test, and in every process that a test starts."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# an ignore without a message or a class of our own; -W ignore for a process
BLANKET = re.compile(
    r'filterwarnings\(\s*"ignore(::[A-Z]\w*)?"|simplefilter\("ignore"|"-W", "ignore|PYTHONWARNINGS='
)


def test_no_file_turns_warnings_off() -> None:
    found = [
        f"{file.relative_to(TESTS)}: {match[0]}"
        for file in TESTS.rglob("*.py")
        if file != Path(__file__)
        for match in BLANKET.finditer(file.read_text("utf-8"))
    ]
    assert found == []


@pytest.mark.parametrize("category", ["UserWarning", "DeprecationWarning", "ResourceWarning"])
def test_warning_ends_a_process(category: str) -> None:
    code = f"import warnings; warnings.warn('x', {category})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1 and f"{category}: x" in done.stderr
