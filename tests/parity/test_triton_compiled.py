"""Triton's kernels compiled for GPUs that are not here: registers, spills and exact arithmetic.

One case of each kernel for one GPU, against what `make kernels` has measured for all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
RESULTS = json.loads((ROOT / "benchmarks/results/gpu-kernels.json").read_text("utf-8"))["kernels"]
CASES = {
    "range, group 128": "sm90",
    "grid search, NVFP4A16": "sm80",
    "exact search, NVFP4A16": "sm90",
    "pack, W4A16": "sm120",
    "sums of squares": "gfx942",
    "histogram": "gfx942",
    "GPTQ block, W4A16": "sm90",
    "coordinate descent, W4A16": "sm100",
}
SPILLED = {("grid search, W4A16, norm 2.4, importance", "sm80"): 8}  # bytes


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[str, object]]]:
    """Compile in a process of its own: this one interprets."""
    folder = tmp_path_factory.mktemp("compiled")
    found: dict[str, dict[str, dict[str, object]]] = {}
    for target in sorted(set(CASES.values())):
        path = folder / f"{target}.json"
        cases = [case for case, wanted in CASES.items() if wanted == target]
        command = [sys.executable, ROOT / "benchmarks" / "gpu_compile.py"]
        command += ["--targets", target, "--json", path, "--cases", *cases]
        environment = {**os.environ, "TRITON_CACHE_DIR": str(folder)}
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found |= json.loads(path.read_text("utf-8"))["kernels"]
    return found


@pytest.mark.parametrize("case", CASES)
def test_registers_and_spills(case: str, compiled: dict[str, dict[str, dict[str, object]]]) -> None:
    ours, known = compiled[case][CASES[case]], RESULTS[case][CASES[case]]
    assert ours["spills"] == 0
    assert ours["registers"] <= known["registers"] + 16
    assert ours.get("inexact", []) == []


def test_results_are_of_every_case_on_every_gpu() -> None:
    for case, targets in RESULTS.items():
        assert set(targets) == {"sm80", "sm90", "sm100", "sm120", "gfx942"}
        for target, found in targets.items():
            assert found["spills"] == SPILLED.get((case, target), 0), (case, target)
            assert found["registers"] <= 255
            if "inexact" in found and "norm 2.4" not in case:
                assert found["inexact"] == [], "not rounded as on the CPU"
