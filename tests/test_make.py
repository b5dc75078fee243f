"""Targets of the Makefile: what `make -n` would run from nothing, and what a build is given."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for Python and for the programs of an environment: writes down how it was called.
RECORDER = """#!/bin/sh
echo "CXX=${CXX-} CXXFLAGS=${CXXFLAGS-} $*" >> "$CALLS"
if [ "$2" = venv ]; then
    mkdir -p "$3/bin"
    cp "$0" "$3/bin/python"
    cp "$0" "$3/bin/steelyard"
fi
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="there is no make")


def make(*words: str | Path, folder: Path, **environment: str) -> str:
    command = ["make", f"VENV={folder}/venv", f"OLDEST={folder}/oldest", *map(str, words)]
    given = {k: v for k, v in os.environ.items() if k not in ("CXX", "CXXFLAGS", "MAKEFLAGS")}
    return subprocess.run(
        command, cwd=ROOT, check=True, capture_output=True, text=True, env=given | environment
    ).stdout


def test_the_demo_installs_the_package_alone(tmp_path: Path) -> None:
    said = make("-n", "demo", folder=tmp_path)
    assert "-e '.'" in said and "steelyard demo" in said
    assert "dev" not in said


@pytest.mark.parametrize("target", ["test", "check"])
def test_tests_and_checks_add_their_tools(target: str, tmp_path: Path) -> None:
    said = make("-n", target, folder=tmp_path)
    assert said.index("-e '.'") < said.index("-r ")
    assert "dev.txt" in said


@pytest.mark.parametrize(
    ("target", "given"),
    [("demo", "CXX= CXXFLAGS= "), ("test-oldest", "CXX=clang++ CXXFLAGS=-march=native ")],
)
def test_the_oldest_versions_are_built_with_the_other_compiler(
    target: str, given: str, tmp_path: Path
) -> None:
    for name in ("recorder", "clang++"):  # the second, so that nothing is installed
        program = tmp_path / "bin" / name
        program.parent.mkdir(exist_ok=True)
        program.write_text(RECORDER)
        program.chmod(0o755)
    make(
        f"PYTHON={tmp_path}/bin/recorder",
        target,
        folder=tmp_path,
        PATH=f"{tmp_path}/bin:{os.environ['PATH']}",
        CALLS=str(tmp_path / "calls"),
    )
    calls = (tmp_path / "calls").read_text().splitlines()
    (build,) = [call for call in calls if "pip install" in call]
    assert build.startswith(given)


def test_benchmarks_run_models_that_are_named(tmp_path: Path) -> None:
    bench = f"BENCH={tmp_path}/bench"
    kernels_alone = make("-n", "bench", bench, folder=tmp_path)
    assert "speed.py" in kernels_alone and "render.py" in kernels_alone
    assert "whole_run.py" not in kernels_alone and "streaming.py" not in kernels_alone
    given = ("MODELS=models/first/ qwen2", "TEXT=prose.txt", "SAMPLES=64", "THREADS=2")
    said = make("-n", "bench", bench, *given, folder=tmp_path)
    runs = [line for line in said.splitlines() if "whole_run.py" in line]
    assert [line.count("OMP_NUM_THREADS=2") for line in runs] == [1, 1]
    for name in ("first", "qwen2"):
        assert f"results/whole-run-{name}-64-2-threads.json" in said
    assert said.index("whole_run.py") < said.index("streaming.py") < said.index("render.py")
