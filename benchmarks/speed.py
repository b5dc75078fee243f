"""Speed and memory of the kernels, beside llm-compressor and torch, in one process.

Each case runs the peer and Steelyard alternately, on the same tensor, and keeps the least of
several times. Times are CPU seconds (and wall seconds); on a shared machine the former say more.

    python benchmarks/speed.py [--rows 4096] [--threads 1,2] [--dtypes bf16,fp32] [--json FILE]
    python benchmarks/speed.py --only optimal "norm 2.4"  # cases by a part of their name

With `--only`, rows of other cases stay in the file. In bf16 on one thread, cases are measured on
the first quarter of the rows as well.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # spinning threads would count as CPU time

import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from llmcompressor.observers import Observer as PeerObserver
from llmcompressor.observers.mse import NVFP4ExpandedMSEObserver
from torch.nn.functional import scaled_dot_product_attention as sdpa

import steelyard
from steelyard import Observer, kernels
from steelyard.kernels.grid_search import search_range
from steelyard.kernels.masked_attention import attention
from steelyard.kernels.pack import quantize_and_pack
from steelyard.kernels.qparams import global_scale_of, scale_dtype_of
from steelyard.kernels.range import range_of
from steelyard.observers import flatten_for_calibration

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class Result:
    case: str
    dtype: str
    threads: int
    peer_cpu: float
    peer_wall: float
    cpu: float
    wall: float
    to_floor: float | None = None
    wanted: float | None = None
    ns_per_weight: float | None = None
    quarter: float | None = None  # the ratio for a quarter of the rows

    @property
    def ratio(self) -> float:
        return self.peer_cpu / self.cpu if self.threads == 1 else self.peer_wall / self.wall


def clock(work: Callable[[], object]) -> tuple[float, float]:
    cpu, wall = time.process_time(), time.perf_counter()
    work()
    return time.process_time() - cpu, time.perf_counter() - wall


def alternate(
    peer: Callable[[], object], ours: Callable[[], object], budget: float = 3.0
) -> tuple[tuple[float, float], tuple[float, float]]:
    """Run both in turn; the least CPU and wall time of each.

    Work that takes longer than the budget is done once: its noise is a small part of it.
    """
    ours()  # the first call loads what it needs
    peers, own = [], []
    spent = 0.0
    while spent < budget:
        peers.append(clock(peer))
        own += [clock(ours) for _ in range(3)]
        spent += peers[-1][1]
    least = lambda times: (min(t[0] for t in times), min(t[1] for t in times))  # noqa: E731
    return least(peers), least(own)


def weight_args(name: str) -> QuantizationArgs:
    if name == "int8 tensor":
        return QuantizationArgs(num_bits=8, strategy="tensor")
    return preset_name_to_scheme(name, ["Linear"]).weights


def observe(
    cls: type, name: str, args: QuantizationArgs, x: torch.Tensor, base: str = "weight", **kw
):
    observer = cls.load_from_registry(name, base_name=base, args=copy.deepcopy(args), **kw)
    return observer(x).get_qparams()


def cases(x: torch.Tensor, dtype: str) -> list[tuple[str, Callable, Callable, float | None]]:
    """Name, the peer's work, ours, and how many times faster it should be."""
    found: list[tuple[str, Callable, Callable, float | None]] = []

    def both(case: str, scheme: str, name: str, wanted: float | None, **kw) -> None:
        args = weight_args(scheme)
        found.append(
            (
                case,
                lambda: observe(PeerObserver, name, args, x, **kw),
                lambda: observe(Observer, name, args, x, **kw),
                wanted,
            )
        )

    for case, scheme in {
        "tensor": "int8 tensor",
        "channel": "W8A8",
        "group 128": "W4A16",
        "group 32 (MXFP4)": "MXFP4A16",
        "group 16 (NVFP4)": "NVFP4A16",
        "block 128 x 128": "FP8_BLOCK",
    }.items():
        both(f"min-max, {case}", scheme, "memoryless_minmax", 4 if dtype == "bf16" else None)
    both("MSE int4 group 128, norm 2.4", "W4A16", "memoryless_mse", 25)
    both("MSE int4 group 128 asymmetric, norm 2.4", "W4A16_ASYM", "memoryless_mse", 25)
    both("MSE int4 group 128, norm 2", "W4A16", "memoryless_mse", 50, norm=2.0)
    both("MSE int8 channel", "W8A8", "memoryless_mse", 15)
    both("MSE fp8 channel", "FP8_DYNAMIC", "memoryless_mse", 20)
    both("MSE fp8 block 128 x 128", "FP8_BLOCK", "memoryless_mse", 20)
    both("MSE NVFP4", "NVFP4A16", "memoryless_mse", 80)
    both("MSE MXFP4", "MXFP4A16", "memoryless_mse", 80)
    found.append(importance_case(x))
    both_signs = {"negative_scales": True}
    for case, scheme, wanted, options in [
        ("optimal int4 group 128, norm 2", "W4A16", 5, {"norm": 2.0}),
        ("optimal int4 group 128, norm 2, both signs", "W4A16", 5, {"norm": 2.0, **both_signs}),
        ("optimal int4 group 128, norm 3", "W4A16", 5, {}),
        ("optimal int4 group 128, norm 3, both signs", "W4A16", 5, both_signs),
        ("optimal NVFP4, norm 3", "NVFP4A16", None, {}),
        ("optimal MXFP4, norm 3", "MXFP4A16", None, {}),
    ]:
        weights = weight_args(scheme)
        found.append(
            (
                f"{case}, beside the peer's 20-step MSE",
                lambda a=weights: observe(PeerObserver, "memoryless_mse", a, x),
                lambda a=weights, o=options: observe(Observer, "optimal", a, x, **o),
                wanted,
            )
        )
    found.append(pack_case(x))
    found.append(expanded_case(x))
    return found


def importance_case(x: torch.Tensor):
    args = weight_args("W4A16")
    importance = torch.rand(x.shape[1]) + 0.1

    def run(cls: type) -> None:
        observer = cls.load_from_registry(
            "imatrix_mse", base_name="weight", args=copy.deepcopy(args)
        )
        observer._imatrix_sum = importance.clone()
        observer._imatrix_count = torch.tensor(1)
        observer(x).get_qparams()

    return "importance int4 group 128", lambda: run(PeerObserver), lambda: run(Observer), 15


def expanded_case(x: torch.Tensor):
    args = weight_args("NVFP4A16")
    factors = [1.8 * (1 - i / 200) for i in range(112)]

    def ours() -> None:
        flat = flatten_for_calibration(x, "weight", args)
        low, high = range_of(flat)
        scale = global_scale_of(torch.maximum(-low.amin(), high.amax()))
        stored = scale_dtype_of(args, x.dtype)
        search_range(flat, args, stored, factors, 2.4, 0, None, scale, (low, high))

    return (
        "range-expanded NVFP4 search, 112 steps",
        lambda: NVFP4ExpandedMSEObserver("weight", copy.deepcopy(args))(x).get_qparams(),
        ours,
        100,
    )


def pack_case(x: torch.Tensor):
    scheme = preset_name_to_scheme("W4A16", ["Linear"])
    qparams = observe(Observer, "memoryless_minmax", scheme.weights, x)
    compressor = BaseCompressor.get_value_from_registry("pack-quantized")
    state = {"weight": x, "weight_scale": qparams["scale"]}
    return (
        "quantize and pack int4 group 128, beside compressed-tensors",
        lambda: compressor.compress(dict(state), scheme),
        lambda: quantize_and_pack(x, qparams["scale"], None, scheme.weights),
        10,
    )


def activation_results(threads: int) -> list[Result]:
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    results = []
    for dtype in DTYPES:
        x = torch.randn(8, 2048, 4096).to(DTYPES[dtype])
        for peer_name, peer in {
            "torch.aminmax": lambda x=x: torch.aminmax(x),
            "llm-compressor": lambda x=x: observe(PeerObserver, "static_minmax", args, x, "input"),
        }.items():
            ours = lambda x=x: observe(Observer, "static_minmax", args, x, "input")  # noqa: E731
            (peer_cpu, peer_wall), (cpu, wall) = alternate(peer, ours, 1.0)
            case = f"min-max of activations 8 x 2048 x 4096, beside {peer_name}"
            results.append(Result(case, dtype, threads, peer_cpu, peer_wall, cpu, wall, wanted=1.0))
    return results


def attention_results(threads: int) -> list[Result]:
    """Causal attention over 512 tokens as models call it; fp32 states are rounded to bf16."""
    results = []
    for dtype in DTYPES:
        for heads, shared, width in ((4, 1, 256), (9, 3, 64), (14, 2, 64)):
            sizes = ((heads, width), (shared, width), (shared, width))
            q, k, v = (torch.randn(1, 512, *s).to(DTYPES[dtype]).transpose(1, 2) for s in sizes)
            peer = lambda q=q, k=k, v=v: sdpa(q, k, v, is_causal=True, enable_gqa=True)  # noqa: E731
            ours = lambda q=q, k=k, v=v: attention(q, k, v, None, True)  # noqa: E731
            if ours() is None:
                continue
            (peer_cpu, peer_wall), (cpu, wall) = alternate(peer, ours, 1.0)
            case = f"attention, {heads} heads of width {width} over {shared}, beside torch's"
            results.append(Result(case, dtype, threads, peer_cpu, peer_wall, cpu, wall))
    return results


def peak_extra(work: Callable[[], object]) -> int:
    """Bytes by which the resident size rose above where it stood, at most (Linux)."""
    work()
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmHWM")
    result = work()
    extra = resident("VmHWM") - before
    del result
    return extra


def resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise LookupError(field)


def memory_results(rows: int) -> list[dict[str, object]]:
    results = []
    x = (torch.randn(4 * rows, 4096) * 0.02).to(torch.bfloat16)  # large, so that pages are noise
    size = x.numel() * x.element_size()
    for case, scheme, name in [
        ("MSE int4 group 128", "W4A16", "memoryless_mse"),
        ("MSE int8 channel", "W8A8", "memoryless_mse"),
        ("MSE fp8 block 128 x 128", "FP8_BLOCK", "memoryless_mse"),
        ("optimal int4 group 128", "W4A16", "optimal"),
        ("MSE NVFP4", "NVFP4A16", "memoryless_mse"),
    ]:
        args = weight_args(scheme)
        ours = peak_extra(lambda a=args, n=name: observe(Observer, n, a, x))
        outcome = sum(
            v.numel() * v.element_size()
            for v in Observer.load_from_registry(name, base_name="weight", args=args)(x)
            .get_statistics()
            .values()
        )
        results.append({"case": case, "extra": ours / size, "statistics": outcome / size})
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--dtypes", default="bf16,fp32")
    parser.add_argument("--only", nargs="+", metavar="PART")
    parser.add_argument("--json", type=Path, default=Path(__file__).parent / "results/speed.json")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    machine = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    features = kernels.info()["cpu_features"]
    print(machine["processor"], *features, "load", *(f"{each:.1f}" for each in machine["load"]))
    environment = {
        "machine": machine,
        "versions": {
            "steelyard": steelyard.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            **kernels.info(),
        },
        "rows": options.rows,
    }
    results: list[Result] = []
    for threads in map(int, options.threads.split(",")):
        torch.set_num_threads(threads)
        for dtype in options.dtypes.split(",") if threads == 1 else ["bf16"]:
            torch.manual_seed(0)
            x = (torch.randn(options.rows, 4096) * 0.02).to(DTYPES[dtype])
            read = lambda x=x: x.view(torch.int64).sum()  # noqa: E731
            floor = min(clock(read)[1] for _ in range(20))
            small = x[: options.rows // 4]
            for (case, peer, ours, wanted), few in zip(
                cases(x, dtype), cases(small, dtype), strict=True
            ):
                if options.only and not any(part in case for part in options.only):
                    continue
                (peer_cpu, peer_wall), (cpu, wall) = alternate(peer, ours)
                floor = min(floor, *(clock(read)[1] for _ in range(5)))
                measured = (peer_cpu, peer_wall, cpu, wall, wall / floor, wanted)
                result = Result(case, dtype, threads, *measured, 1e9 * cpu / x.numel())
                if dtype == "bf16" and threads == 1:
                    (few_peer, _), (few_ours, _) = alternate(few[1], few[2])
                    result.quarter = few_peer / few_ours
                results.append(result)
                print(
                    f"{case:<60} {dtype} {threads} thr  peer {peer_cpu:8.4f} s  ours {cpu:8.4f} s"
                    f"  {result.ratio:7.1f} x  {result.to_floor:6.1f} floors"
                    f"  {result.ns_per_weight:6.2f} ns per weight",
                    flush=True,
                )
        if not options.only:
            results += activation_results(threads) + attention_results(threads)
    options.json.parent.mkdir(exist_ok=True)
    rows = [{**asdict(r), "ratio": r.ratio} for r in results]
    before = json.loads(options.json.read_text()) if options.json.exists() else {}
    if options.only:  # all else stays
        environment, memory = before, before["memory"]
        measured = {(r["case"], r["dtype"], r["threads"]): r for r in rows}
        kept = [(r["case"], r["dtype"], r["threads"]) for r in before["results"]]
        rows = [measured.pop(key, r) for key, r in zip(kept, before["results"], strict=True)]
        rows += measured.values()
    elif before:  # rows of other types and thread counts stay
        memory = memory_results(options.rows)
        measured = {(r["dtype"], r["threads"]) for r in rows}
        kept = [r for r in before["results"] if (r["dtype"], r["threads"]) not in measured]
        rows = kept + rows
    else:
        memory = memory_results(options.rows)
    outcome = {
        **environment,
        "results": rows,
        "memory": memory,
    }
    options.json.write_text(json.dumps(outcome, indent=1) + "\n")


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "?")


if __name__ == "__main__":
    main()
