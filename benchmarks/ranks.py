"""Two ranks over one: GPTQ layer by layer, and a stream with an MSE search, one thread a rank.

Worlds of one and of two processes take turns at the same run, started as torchrun starts them.
Counted is the run itself, from the call of `oneshot` to its return; imports are not. "Exchange" is
the share of a rank's time in which it sent, received or waited for the other, the larger of the
two. What both worlds wrote is compared byte for byte.

    python benchmarks/ranks.py MODEL --text FILE --python OURS [--gigabytes 4] [--json FILE]
"""

from __future__ import annotations

import argparse
import filecmp
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

from streaming import int4, started
from whole_run import processor

WANTED = 1.7
CASES = ("GPTQ", "stream, MSE")


# ---- in a process of its own ----


def work(case: str, source: str, text: str, output: str, record: str) -> None:
    import time

    import torch

    from steelyard import oneshot
    from steelyard.distributed import Ranks, join_from_environment

    torch.set_num_threads(1)
    join_from_environment()
    gptq = case == "GPTQ"
    data = {"dataset": text, "num_calibration_samples": 64, "max_seq_length": 512}
    group = int4("memoryless_mse")
    group["weights"]["group_size"] = 32  # which fits small models too
    name = "GPTQModifier" if gptq else "QuantizationModifier"
    recipe = {name: {"ignore": ["lm_head"], "config_groups": {"all": group}}}
    ranks = Ranks.current()
    with ranks.together():
        ranks.wait()
        begun, cpu = time.perf_counter(), time.process_time()
        oneshot(source, recipe, output_dir=output, show_progress=False, **(data if gptq else {}))
        seconds = time.perf_counter() - begun
        figures = {"wall": seconds, "cpu": time.process_time() - cpu, "waited": ranks.waited}
        Path(f"{record}-{ranks.rank}").write_text(json.dumps(figures))


# ---- the comparison ----


def world(python: str, count: int, arguments: list[str], record: Path) -> dict:
    """Run one world; return the wall time, the CPU time of all, and the share of exchange."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    processes = []
    for rank in range(count):
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "GLOO_SOCKET_IFNAME": "lo",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(count),
            "TORCHELASTIC_RUN_ID": "benchmark",
        }
        command = [python, __file__, "--work", *arguments, str(record)]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{arguments[0]} failed with {count} ranks")
    found = [json.loads(Path(f"{record}-{rank}").read_text()) for rank in range(count)]
    return {
        "wall": max(each["wall"] for each in found),
        "cpu": sum(each["cpu"] for each in found),
        "exchange": max(each["waited"] / each["wall"] for each in found),
    }


def same(first: Path, second: Path) -> bool:
    names = sorted(p.name for p in first.glob("*.safetensors"))
    matching, _, _ = filecmp.cmpfiles(first, second, names, shallow=False)
    return sorted(matching) == names == sorted(p.name for p in second.glob("*.safetensors"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model")
    parser.add_argument("--text", required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--gigabytes", default="4")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--only", choices=CASES)
    parser.add_argument("--json")
    given = parser.parse_args()
    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        synthetic = folder / "synthetic"
        if given.only != "GPTQ":
            started(given.python, "make", synthetic, given.gigabytes)
        for case in CASES if given.only is None else (given.only,):
            source = given.model if case == "GPTQ" else str(synthetic)
            best: dict[int, dict] = {}
            outputs = {count: folder / f"out-{count}" for count in (1, 2)}
            for _ in range(given.runs):
                for count in (1, 2):
                    shutil.rmtree(outputs[count], ignore_errors=True)
                    arguments = [case, source, given.text, str(outputs[count])]
                    found = world(given.python, count, arguments, folder / "record")
                    known = best.setdefault(count, found)
                    best[count] = min(known, found, key=lambda each: each["wall"])
            one, two = best[1], best[2]
            results.append(
                {
                    "case": case,
                    "one": one,
                    "two": two,
                    "ratio": one["wall"] / two["wall"],
                    "wanted": WANTED,
                    "same": same(outputs[1], outputs[2]),
                }
            )
            print(json.dumps(results[-1], indent=1))
    if given.json:
        content = {
            "model": Path(given.model).name,
            "gigabytes": float(given.gigabytes),
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "versions": started(given.python, "versions", "torch", "compressed-tensors"),
            "results": results,
        }
        Path(given.json).write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(*sys.argv[2:])
    else:
        main()
