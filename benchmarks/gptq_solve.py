"""The kernels of GPTQ alone, beside llm-compressor's, in one process and in turn.

    python benchmarks/gptq_solve.py [--only solves hessians] [--json FILE]

The solve: both get the same bf16 weight, Hessian and scales, and round the columns with the
largest inputs first. What they find is held against each other too: the error of the outputs.

The Hessian of 512 bf16 inputs: beside the peer's, and beside a slab-wise fp32 product of torch's.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs
from llmcompressor.modifiers.gptq.gptq_quantize import quantize_weight
from llmcompressor.modifiers.gptq.helpers import accumulate_hessian, make_empty_hessian

from steelyard import kernels
from steelyard.kernels.gptq_rounding import activation_order, solve
from steelyard.kernels.hessian import accumulate, accumulate_product, empty_slab, slab_starts

SIZES = [
    *((288, 288, 32), (768, 288, 32), (288, 768, 32)),  # stories15M
    *((192, 576, 64), (576, 576, 64), (1536, 576, 64), (576, 1536, 64)),  # SmolLM2-135M
    *((2048, 2048, 128), (4096, 4096, 128)),
]
WIDTHS = [288, 576, 640, 1536, 2048, 4096]  # of Hessians
TOKENS = 512


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

    sides = {"peer": peer, "ours": ours}
    found: dict = {"rows": rows, "columns": columns, "group": group, **least(sides, runs)}
    for side, work in sides.items():
        found[side]["loss"] = loss(weight, work(), hessian)
    return found


def least(sides: dict[str, Callable[[], object]], runs: int) -> dict[str, dict[str, float]]:
    """Run all sides in turn; return the least times of each, in seconds."""
    found = {side: {"wall": float("inf"), "cpu": float("inf")} for side in sides}
    for work in sides.values():
        work()  # the first call loads what it needs
    for _ in range(runs):
        for side, work in sides.items():
            started = time.perf_counter(), time.process_time()
            work()
            taken = time.perf_counter() - started[0], time.process_time() - started[1]
            found[side]["wall"] = min(found[side]["wall"], taken[0])
            found[side]["cpu"] = min(found[side]["cpu"], taken[1])
    return found


def measure_hessian(columns: int, runs: int) -> dict:
    torch.manual_seed(columns)
    x = torch.randn(TOKENS, columns).to(torch.bfloat16)
    wide, drifted = x.float(), x + 0.1 * torch.randn(x.shape).to(torch.bfloat16)
    module = torch.nn.Linear(columns, 1, bias=False)
    whole, count = make_empty_hessian(module), torch.zeros(())
    starts = list(slab_starts(columns))
    slabs = [empty_slab(columns, start) for start in starts]
    rows = [torch.zeros(len(slab), columns) for slab in slabs]
    sides = {
        "peer": lambda: accumulate_hessian(x, module, whole, count),
        "fp32 products": lambda: accumulate(slabs, x, "reference"),
        "fp32 inputs": lambda: accumulate(slabs, wide),
        "bf16 inputs": lambda: accumulate(slabs, x),
        "drift": lambda: accumulate_product(rows, starts, drifted - x, x),
    }
    return {"columns": columns, "sides": least(sides, 4 * runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=["solves", "hessians"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    only = options.only or ["solves", "hessians"]
    torch.set_num_threads(1)
    outcome = {}
    if options.json and options.json.exists():  # the other half stays
        outcome = json.loads(options.json.read_text())
    outcome["instruction set"] = kernels.info()["instruction_set"]
    outcome["load"] = os.getloadavg()
    print(*kernels.info()["cpu_features"], "load", *(f"{each:.1f}" for each in outcome["load"]))
    if "hessians" in only:
        outcome["hessians"] = [measure_hessian(columns, options.runs) for columns in WIDTHS]
        for r in outcome["hessians"]:
            times = {side: 1000 * taken["cpu"] for side, taken in r["sides"].items()}
            print(r["columns"], ", ".join(f"{side} {ms:.1f} ms" for side, ms in times.items()))
    results = []
    for size in SIZES if "solves" in only else []:
        r = measure(*size, options.runs)
        results.append(r)
        print(
            f"{size[0]} x {size[1]}, group {size[2]}: {1000 * r['peer']['cpu']:.0f} ms and "
            f"{1000 * r['ours']['cpu']:.0f} ms, {r['peer']['cpu'] / r['ours']['cpu']:.1f}x; loss "
            f"{r['ours']['loss'] / r['peer']['loss']:.4f} of the peer's",
            flush=True,
        )
    if results:
        outcome["results"] = results
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
