"""The GPTQ solve alone, beside llm-compressor's, in one process and in turn.

    python benchmarks/gptq_solve.py [--json FILE]

Both get the same bf16 weight, Hessian and scales, and round the columns with the largest
inputs first. What they find is held against each other too: the error of the outputs.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight

from steelyard.kernels.gptq_rounding import activation_order, solve

SIZES = [
    *((288, 288, 32), (768, 288, 32), (288, 768, 32)),  # stories15M
    *((192, 576, 64), (576, 576, 64), (1536, 576, 64), (576, 1536, 64)),  # SmolLM2-135M
    *((2048, 2048, 128), (4096, 4096, 128)),
]


def problem(rows: int, columns: int, group: int):
    """A weight, the Hessian of correlated inputs, and min-max scales."""
    torch.manual_seed(rows + columns)
    weight = (torch.randn(rows, columns) * 0.02).to(torch.bfloat16)
    inputs = torch.randn(2 * columns, 64) @ torch.randn(64, columns)
    inputs += torch.randn(2 * columns, columns)
    scale = weight.float().view(rows, -1, group).abs().amax(-1) / 7.5
    return weight, inputs.t() @ inputs, scale.to(torch.bfloat16)


def loss(weight: torch.Tensor, rounded: torch.Tensor, hessian: torch.Tensor) -> float:
    off = weight.double() - rounded.double()
    return float(((off @ hessian.double()) * off).sum())


def measure(rows: int, columns: int, group: int, runs: int) -> dict:
    weight, hessian, scale = problem(rows, columns, group)
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group, actorder="static")
    zero = torch.zeros_like(scale, dtype=torch.int8)

    def peer() -> torch.Tensor:
        given = weight.float()[None].clone(), hessian[None].clone(), scale[None].clone()
        return quantize_weight(*given, zero[None], None, args)[0][0]

    def ours() -> torch.Tensor:
        return solve(weight, hessian, scale, None, args, order=activation_order(hessian)).weight

    found: dict = {"rows": rows, "columns": columns, "group": group}
    for side, work in (("peer", peer), ("ours", ours)):
        found[side] = {"wall": float("inf"), "cpu": float("inf")}
        found[side]["loss"] = loss(weight, work(), hessian)
    for _ in range(runs):
        for side, work in (("peer", peer), ("ours", ours)):
            started = time.perf_counter(), time.process_time()
            work()
            taken = time.perf_counter() - started[0], time.process_time() - started[1]
            found[side]["wall"] = min(found[side]["wall"], taken[0])
            found[side]["cpu"] = min(found[side]["cpu"], taken[1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    results = []
    for size in SIZES:
        r = measure(*size, options.runs)
        results.append(r)
        print(
            f"{size[0]} x {size[1]}, group {size[2]}: {1000 * r['peer']['cpu']:.0f} ms and "
            f"{1000 * r['ours']['cpu']:.0f} ms, {r['peer']['cpu'] / r['ours']['cpu']:.1f}x; loss "
            f"{r['ours']['loss'] / r['peer']['loss']:.4f} of the peer's",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps({"results": results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
