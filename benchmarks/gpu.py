"""Measure Triton's kernels on the GPU that is here, and check what they find against the CPU.

    python benchmarks/gpu.py [--size 4096] [--json results.json]

For each kernel: the time on the GPU beside the CPU's compiled kernel and the reference on the GPU,
bytes read a second, and how many bytes or choices differ from the CPU's. Packing, ranges and
histograms must not differ; the command ends with an error if they do. A search may choose otherwise
where two candidates are as good as equal.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.kernels.backend import triton_device
from steelyard.kernels.bin_counts import add_values
from steelyard.kernels.gptq_rounding import solve
from steelyard.kernels.grid_search import search_range, shrink_factors
from steelyard.kernels.optimal_search import optimal_qparams
from steelyard.kernels.pack import quantize_and_pack
from steelyard.kernels.qparams import global_scale_of, qparams_from_range, scale_dtype_of
from steelyard.kernels.range import range_of
from steelyard.kernels.squares import sum_of_squares
from steelyard.observers.helpers import flatten_for_calibration

SEARCHED = ["W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"]
PACKED = ["W4A16", "W4A16_ASYM", "W8A16", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "MXFP8A16"]

# what a case returns is compared; "exact" cases must be the same bytes
Case = tuple[str, bool, Callable[[torch.Tensor, str], Any]]


def cases() -> list[Case]:
    return [
        ("range, group 128", True, lambda x, b: range_of(x.view(1, len(x), -1, 128), 1, b)),
        ("range, tensor", True, lambda x, b: range_of(x.view(1, 1, -1), 1, b)),
        ("histogram", True, _histogram),
        ("sums of squares", False, sum_of_squares),
        *((f"pack, {name}", True, _packing(name)) for name in PACKED),
        *((f"grid search, {name}", False, _search(name)) for name in SEARCHED),
        *((f"exact search, {name}", False, _exact(name)) for name in SEARCHED),
        ("GPTQ, W4A16", False, _gptq(0)),
        ("GPTQ with two rounds, W4A16", False, _gptq(2)),
    ]


def _args(scheme: str) -> QuantizationArgs:
    args: QuantizationArgs = preset_name_to_scheme(scheme, ["Linear"]).weights
    return args


def _shared(x: torch.Tensor, args: QuantizationArgs) -> torch.Tensor | None:
    return global_scale_of(x.abs().max().float()) if args.strategy == "tensor_group" else None


def _histogram(x: torch.Tensor, backend: str) -> torch.Tensor:
    values = x.unsqueeze(1)
    return add_values(None, values, range_of(values, 1, backend), backend=backend)


def _packing(scheme: str) -> Callable[[torch.Tensor, str], torch.Tensor]:
    args = _args(scheme)

    def run(x: torch.Tensor, backend: str) -> torch.Tensor:
        flat, shared = flatten_for_calibration(x, "weight", args), _shared(x, args)
        ends = range_of(flat, 1, backend)
        dtype = scale_dtype_of(args, x.dtype)
        scale, zero_point = qparams_from_range(*ends, args, dtype, shared)
        return quantize_and_pack(x, scale, zero_point, args, shared, backend=backend)

    return run


def _search(scheme: str) -> Callable[[torch.Tensor, str], Any]:
    args = _args(scheme)

    def run(x: torch.Tensor, backend: str) -> Any:
        flat, factors = flatten_for_calibration(x, "weight", args), shrink_factors(0.2, 100)
        dtype = scale_dtype_of(args, x.dtype)
        return search_range(
            flat, args, dtype, factors, 2.4, 5, None, _shared(x, args), backend=backend
        )

    return run


def _exact(scheme: str) -> Callable[[torch.Tensor, str], Any]:
    args = _args(scheme)

    def run(x: torch.Tensor, backend: str) -> Any:
        flat = flatten_for_calibration(x, "weight", args)
        dtype = scale_dtype_of(args, x.dtype)
        return optimal_qparams(flat, args, dtype, None, _shared(x, args), backend=backend)

    return run


def _gptq(rounds: int) -> Callable[[torch.Tensor, str], torch.Tensor]:
    args = _args("W4A16")

    def run(x: torch.Tensor, backend: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(2 * x.shape[1], x.shape[1], generator=generator).to(x.device)
        ends = range_of(flatten_for_calibration(x, "weight", args), 1, backend)
        scale, zero_point = qparams_from_range(*ends, args, x.dtype)
        hessian = inputs.t() @ inputs
        found = solve(x, hessian, scale, zero_point, args, rounds=rounds, backend=backend)
        return found.weight

    return run


def measured(run: Callable[[], Any], wait: Callable[[], None]) -> tuple[float, Any]:
    """Return the least time of three, after one that compiles, and the result."""
    result = run()
    times = []
    for _ in range(3):
        wait()
        begin = time.perf_counter()
        result = run()
        wait()
        times.append(time.perf_counter() - begin)
    return min(times), result


def share_that_differs(ours: Any, theirs: Any) -> float:
    """Return the fraction of bytes that differ, over all tensors of a result."""
    pairs = (
        [(ours, theirs)] if isinstance(ours, torch.Tensor) else list(zip(ours, theirs, strict=True))
    )
    raw = [tuple(t.cpu().contiguous().view(torch.uint8) for t in pair) for pair in pairs]
    different = sum(int((a != b).sum()) for a, b in raw)
    return different / sum(a.numel() for a, _ in raw)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", type=int, default=4096, help="rows and columns of the weight")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    device, reason = triton_device()
    if device is None:
        raise SystemExit(f"cannot measure: {reason}")
    interface = torch.get_device_module(device)
    wait = getattr(interface, "synchronize", lambda: None)
    generator = torch.Generator().manual_seed(0)
    weight = (torch.randn(given.size, given.size, generator=generator) * 0.02).to(torch.bfloat16)
    there = weight.to(device)
    on_cpu = "auto" if device != "cpu" else "reference"
    rows, wrong = [], []
    for name, exact, run in cases():
        gpu, ours = measured(lambda run=run: run(there, "triton"), wait)
        plain, _ = measured(lambda run=run: run(there, "reference"), wait)
        cpu, theirs = measured(lambda run=run: run(weight, on_cpu), lambda: None)
        differs = share_that_differs(ours, theirs)
        row = {"kernel": name, "ms": gpu * 1e3, "reference_ms": plain * 1e3, "cpu_ms": cpu * 1e3}
        row |= {"gb_per_second": weight.nbytes / gpu / 1e9, "differs": differs}
        rows.append(row)
        wrong += [name] if exact and differs else []
        print(
            f"{name:32} {gpu * 1e3:9.3f} ms, reference {plain * 1e3:9.2f}, CPU {cpu * 1e3:9.1f}; "
            f"{row['gb_per_second']:6.0f} GB/s; differs in {differs:.2e} of its bytes",
            flush=True,
        )
    if given.json is not None:
        given.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    if wrong:
        raise SystemExit(f"other bytes than on the CPU: {', '.join(wrong)}")


if __name__ == "__main__":
    main()
