"""Compile every Triton kernel for GPUs that need not be here; read registers, spills and loops.

    python benchmarks/gpu_compile.py --json benchmarks/results/gpu-kernels.json

The cases call the package's own functions on a weight of 4096 x 4096, with the launch recorded
instead of run: what is compiled is what a GPU would run, specialised as Triton specialises it.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

os.environ["TRITON_INTERPRET"] = "0"

import torch
import triton
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from steelyard.kernels.bin_counts import BINS
from steelyard.kernels.gptq_grid import Grid
from steelyard.kernels.gptq_refine import ScaleSteps
from steelyard.kernels.grid_search import shrink_factors
from steelyard.kernels.qparams import scale_dtype_of
from steelyard.kernels.scale_blocks import scale_shape

TARGETS = {
    "sm80": GPUTarget("cuda", 80, 32),
    "sm90": GPUTarget("cuda", 90, 32),
    "sm100": GPUTarget("cuda", 100, 32),
    "sm120": GPUTarget("cuda", 120, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
SIZE = 4096
# PTX that would give other bytes than the CPU's: fused, approximate, or without subnormal numbers
INEXACT = r"\b(?:fma\.rn|div\.full|div\.approx|(?:add|sub|mul|div|fma)[.\w]*\.ftz)\.f32"
HOSTS = ["range", "search", "optimal", "pack", "squares", "histogram", "blocks"]
_TYPES = {
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
}


class Launch(NamedTuple):
    """One launch of a kernel, as the package asked for it."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    blocks: dict[str, Any]
    num_warps: int

    def source(self) -> ASTSource:
        """Return the kernel, specialised as Triton's own launch does for these arguments."""
        signature, constants, attributes = {}, dict(self.blocks), {}
        for position, (name, value) in enumerate(
            zip(self.kernel.arg_names, self.arguments, strict=False)
        ):
            whole = isinstance(value, int)
            if value is None or (whole and value == 1):
                signature[name], constants[name] = "constexpr", value
            elif isinstance(value, torch.Tensor):
                signature[name] = "*" + _TYPES[value.dtype]
            else:
                large = whole and value >= 1 << 31
                signature[name] = "i64" if large else "i32" if whole else "fp32"
            aligned = isinstance(value, torch.Tensor) or (whole and value % 16 == 0)
            if aligned and signature[name] != "constexpr":
                attributes[(position,)] = [["tt.divisibility", 16]]
        signature |= dict.fromkeys(self.blocks, "constexpr")
        signature = {name: signature[name] for name in self.kernel.arg_names}
        return ASTSource(self.kernel, signature, constants, attributes)


@contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Record launches instead of running them."""
    found: list[Launch] = []

    def record(kernel: Any, grid: Any, on: Any, *arguments: Any, num_warps: int, **blocks: Any):
        found.append(Launch(kernel, grid, arguments, blocks, num_warps))

    modules = [import_module(f"steelyard.kernels.triton_{name}") for name in HOSTS]
    original = modules[0].launch
    for module in modules:
        module.launch = record
    try:
        yield found
    finally:
        for module in modules:
            module.launch = original


def weight_args(scheme: str) -> QuantizationArgs:
    args: QuantizationArgs = preset_name_to_scheme(scheme, ["Linear"]).weights
    return args


def empty_weight() -> torch.Tensor:
    return torch.empty(SIZE, SIZE, dtype=torch.bfloat16)


def groups_of(args: QuantizationArgs) -> torch.Tensor:
    width = args.group_size or SIZE
    return empty_weight().view(1, SIZE, SIZE // width, width)


def searched(scheme: str, norm: float, patience: int = 0, weighted: bool = False) -> None:
    from steelyard.kernels.triton_search import search_range

    args = weight_args(scheme)
    flat = groups_of(args)
    ends = torch.empty(2, *flat.shape[1:-1])
    dtype = scale_dtype_of(args, torch.bfloat16)
    importance = torch.empty(SIZE).view(1, 1, *flat.shape[2:]) if weighted else None
    shared = torch.ones(1) if args.strategy == "tensor_group" else None
    search_range(
        flat, args, dtype, shrink_factors(0.2, 100), norm, patience, importance, shared, tuple(ends)
    )


def shared_search() -> None:
    from steelyard.kernels.triton_search import search_range

    flat = empty_weight().view(1, 1, -1)
    ends = (torch.zeros(1), torch.ones(1))
    factors = shrink_factors(0.2, 100)
    with torch.no_grad():
        search_range(flat, weight_args("FP8"), torch.bfloat16, factors, 2.4, 0, None, None, ends)


def optimal(scheme: str, norm: float = 2.0, negative: bool = False) -> None:
    from steelyard.kernels.triton_optimal import optimal_qparams

    args = weight_args(scheme)
    flat = groups_of(args)
    shared = torch.ones(1) if args.strategy == "tensor_group" else None
    dtype = scale_dtype_of(args, torch.bfloat16)
    optimal_qparams(
        flat, args, dtype, None, shared, tuple(torch.empty(2, *flat.shape[1:-1])), negative, 1, norm
    )


def packed(scheme: str, layout: int, bits: int | None = None) -> None:
    from steelyard.kernels.triton_pack import pack

    args = weight_args(scheme)
    if bits is not None:
        args = args.model_copy(update={"num_bits": bits})
    width = args.group_size or SIZE
    scale = torch.empty(scale_shape(args, (SIZE, SIZE)), dtype=torch.bfloat16)
    zero = scale if not args.symmetric or layout == 2 else None
    size = SIZE * (args.num_bits if layout != 1 else 8) // 8
    out = torch.empty(SIZE, size, dtype=torch.uint8)
    shared = torch.ones(1) if args.strategy == "tensor_group" else None
    errors = torch.empty(SIZE, dtype=torch.float64)
    pack(empty_weight(), scale, zero, args, shared, (1, width), layout, shared is None, out, errors)


def block(scheme: str, refined: bool) -> None:
    from steelyard.kernels import triton_blocks

    args = weight_args(scheme)
    width = args.group_size or SIZE
    scale = torch.empty(SIZE // width, SIZE)
    group = torch.arange(128) // width
    grid = Grid(scale, None, group, args, torch.bfloat16, True, lambda weight: weight)
    part, square = torch.empty(128, SIZE), torch.empty(128, 128)
    if refined:
        shared = torch.ones(1) if args.strategy == "tensor_group" else None
        steps = ScaleSteps(scale_dtype_of(args, torch.bfloat16), shared)
        triton_blocks.refine_block(square, part, grid, steps, part, part, True)
    else:
        losses = torch.empty(SIZE, dtype=torch.float64)
        factor = torch.empty(SIZE, SIZE)[:128, :128]
        triton_blocks.gptq_block(part, factor, part, torch.empty(128), grid, part, part, losses)


def ranged(*shape: int) -> None:
    from steelyard.kernels.triton_range import range_of

    range_of(empty_weight().view(shape))


def squared() -> None:
    from steelyard.kernels.triton_squares import sum_of_squares

    sum_of_squares(empty_weight())


def counted() -> None:
    from steelyard.kernels.triton_histogram import add_counts

    add_counts(empty_weight().view(SIZE, 1, SIZE), torch.zeros(1, 1 + BINS, dtype=torch.int64))


CASES: dict[str, Callable[[], None]] = {
    "range, group 128": lambda: ranged(1, SIZE, SIZE // 128, 128),
    "range, tensor": lambda: ranged(1, 1, SIZE * SIZE),
    "grid search, W4A16": lambda: searched("W4A16", 2.0),
    "grid search, W4A16, norm 2.4, importance": lambda: searched("W4A16", 2.4, 0, True),
    "grid search, W4A16_ASYM, patience": lambda: searched("W4A16_ASYM", 2.0, 5),
    "grid search, FP8_DYNAMIC, norm 2.4": lambda: searched("FP8_DYNAMIC", 2.4),
    "grid search, NVFP4A16": lambda: searched("NVFP4A16", 2.0),
    "grid search, FP8 per tensor, norm 2.4": shared_search,
    "exact search, W4A16": lambda: optimal("W4A16"),
    "exact search, W4A16, negative, norm 2.4": lambda: optimal("W4A16", 2.4, True),
    "exact search, W4A16_ASYM": lambda: optimal("W4A16_ASYM"),
    "exact search, NVFP4A16": lambda: optimal("NVFP4A16"),
    "pack, W4A16": lambda: packed("W4A16", 0),
    "pack, 3 bits": lambda: packed("W4A16", 0, 3),
    "pack, FP8_DYNAMIC": lambda: packed("FP8_DYNAMIC", 1),
    "pack, NVFP4A16": lambda: packed("NVFP4A16", 2),
    "sums of squares": squared,
    "histogram": counted,
    "GPTQ block, W4A16": lambda: block("W4A16", False),
    "GPTQ block, W8A8": lambda: block("W8A8", False),
    "coordinate descent, W4A16": lambda: block("W4A16", True),
    "coordinate descent, NVFP4A16": lambda: block("NVFP4A16", True),
}


def launches_of(case: str) -> Launch:
    with recorded() as found:
        CASES[case]()
    return found[0]


def compiled(launch: Launch, target: str) -> dict[str, Any]:
    """Compile a launch; return registers per thread, spills, shared memory, the longest loop."""
    options = {"num_warps": launch.num_warps, "enable_fp_fusion": False}
    built = triton.compile(launch.source(), target=TARGETS[target], options=options)
    found: dict[str, Any] = {"shared": built.metadata.shared}
    if "amdgcn" in built.asm:
        text = built.asm["amdgcn"]
        read = {k: int(v) for k, v in re.findall(r"\.(\w+_count):\s+(\d+)", text)}
        return found | {"registers": read["vgpr_count"], "spills": read["vgpr_spill_count"]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(built.asm["cubin"])
        usage = _tool("cuobjdump", "--dump-resource-usage", path)
        code = _tool("nvdisasm", "-c", path)
    registers, stack, local = (
        int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "STACK", "LOCAL")
    )
    found |= {"registers": registers, "spills": stack + local}
    found["loop_instructions"] = innermost_loop(code)
    found["inexact"] = sorted(set(re.findall(INEXACT, built.asm["ptx"])))
    return found


def _tool(name: str, *arguments: Any) -> str:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    done = subprocess.run([folder / name, *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def innermost_loop(code: str) -> int:
    """Return the instructions of the longest loop without a loop in it."""
    labels: dict[str, int] = {}
    jumps: list[tuple[int, str]] = []
    count = 0
    for line in code.splitlines():
        label = re.match(r"\s*(\.L_\w+):", line)
        if label:
            labels[label[1]] = count
        elif re.match(r"\s*/\*[0-9a-f]+\*/", line):
            jump = re.search(r"\bBRA(?:\.\w+)* .*`\((\.L_\w+)\)", line)
            if jump:
                jumps.append((count, jump[1]))
            count += 1
    loops = [(labels[to], at) for at, to in jumps if labels.get(to, count) <= at]
    inner = [
        (first, last)
        for first, last in loops
        if not any(f >= first and at < last and (f, at) != (first, last) for f, at in loops)
    ]
    return max((last - first + 1 for first, last in inner), default=0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--targets", nargs="*", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    given = parser.parse_args()
    results: dict[str, Any] = {}
    for case in given.cases:
        launch = launches_of(case)
        results[case] = {target: compiled(launch, target) for target in given.targets}
        print(case, json.dumps(results[case]), file=sys.stderr)
    text = json.dumps({"triton": triton.__version__, "kernels": results}, indent=1) + "\n"
    if given.json is None:
        print(text)
    else:
        given.json.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
