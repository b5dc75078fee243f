"""What an H100 would take for each kernel: a model, not a measurement.

    python benchmarks/gpu_model.py

Bytes are those that a kernel must move, each weight once. Instructions are those of the longest
loop that the compiler made for sm90 (results/gpu-kernels.json), times how often it runs. The time
is the larger of bytes over the memory's rate and instructions over the rate at which they issue,
so latencies, launches and what is outside of the loop come on top.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).parent / "results" / "gpu-kernels.json"
BANDWIDTH = 3.35e12  # bytes a second, H100 SXM
ISSUE = 132 * 4 * 1.755e9  # warp instructions a second: 132 SMs, 4 schedulers each
WEIGHTS = 4096 * 4096


class Work(NamedTuple):
    """What a kernel does for a weight of 4096 x 4096 in bf16.

    evaluations: of the loop's subject per weight; candidates, in a search
    per_thread:  evaluations that one thread makes in one run of the loop
    """

    bytes_per_weight: float
    evaluations: float
    per_thread: float


GRID = 32  # candidates tried at once; the grid has 21
EXACT = 7.25 * 32  # codes tried for normally distributed groups of 128: int4, scales in bf16
WORK = {
    "range, group 128": Work(2 + 8 / 128, 1, 16),
    "range, tensor": Work(2, 1, 16),
    "grid search, W4A16": Work(2 + 16 / 128, GRID, 32),
    "grid search, W4A16, norm 2.4, importance": Work(2 + 16 / 128, GRID, 32),
    "grid search, W4A16_ASYM, patience": Work(2 + 16 / 128, GRID, 32),
    "grid search, FP8_DYNAMIC, norm 2.4": Work(2, GRID, 32),
    "grid search, NVFP4A16": Work(2 + 16 / 16, GRID, 16),
    "exact search, W4A16": Work(2 + 12 / 128, EXACT, 32),
    "pack, W4A16": Work(2 + 0.5 + 4 / 128, 1, 8),
    "pack, 3 bits": Work(2 + 0.375 + 4 / 128, 16 / (32 / 3), 8),
    "pack, FP8_DYNAMIC": Work(2 + 1, 1, 8),
    "pack, NVFP4A16": Work(2 + 0.5 + 8 / 16, 1, 8),
    "sums of squares": Work(2, 1, 16),
    "histogram": Work(2, 1, 32),
    # a loop is one column: 128 threads hold 32 rows, and the sums of 128 columns
    "GPTQ block, W4A16": Work(4 * 4, 1, 32 / 128),
    "GPTQ block, W8A8": Work(4 * 4, 1, 32 / 128),
}


def seconds(case: str, loop_instructions: int) -> tuple[float, float]:
    """Return the time for a kernel's bytes and that for its instructions."""
    work = WORK[case]
    instructions = WEIGHTS * work.evaluations * loop_instructions / work.per_thread / 32
    return WEIGHTS * work.bytes_per_weight / BANDWIDTH, instructions / ISSUE


def table() -> list[str]:
    """Return the rows of the table in docs/gpu.md."""
    found = json.loads(RESULTS.read_text("utf-8"))["kernels"]
    lines = [
        "| kernel, on 4096 x 4096 in bf16 | bytes, us | instructions, us | per weight |",
        "|---|---|---|---|",
    ]
    for case, work in WORK.items():
        loop = found[case]["sm90"]["loop_instructions"]
        memory, issue = seconds(case, loop)
        each = loop * work.evaluations / work.per_thread
        lines.append(f"| {case} | {memory * 1e6:.0f} | {issue * 1e6:.0f} | {each:.0f} |")
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
