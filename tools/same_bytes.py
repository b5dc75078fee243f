"""Compare the outputs of two versions of the code: a commit, and the working tree.

    python tools/same_bytes.py [REV] [--only TEXT]

Calibrated outputs depend on matrix products, which round differently on another processor, so no
digest of them can be kept in a test. Here both versions run on this machine, in separate processes,
on the demo model: every case with one and two threads, and with one and two ranks. Prints a line
for each, and exits with 1 if a tensor differs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
WORLDS = ((1, 1), (1, 2), (2, 1))  # ranks, threads of each
LINEAR = {"targets": ["Linear"]}
INT8 = {"num_bits": 8, "strategy": "channel", "observer": "memoryless_minmax"}


def static_int8(observer: str) -> dict[str, Any]:
    inputs = {"num_bits": 8, "strategy": "tensor", "dynamic": False, "observer": observer}
    group = {**LINEAR, "weights": INT8, "input_activations": inputs}
    return {"QuantizationModifier": {"ignore": ["lm_head"], "config_groups": {"all": group}}}


def gptq(scheme: str) -> dict[str, Any]:
    return {"GPTQModifier": {"scheme": scheme, "ignore": ["lm_head"], "weight_observer": "optimal"}}


CASES: dict[str, dict[str, Any]] = {
    "W8A8 static, minmax": static_int8("minmax"),
    "W8A8 static, static_minmax": static_int8("static_minmax"),
    "W8A8 static, mse": static_int8("mse"),
    "FP8 KV cache": {
        "QuantizationModifier": {
            "scheme": "FP8_DYNAMIC",
            "ignore": ["lm_head"],
            "weight_observer": "memoryless_minmax",
            "kv_cache_scheme": {
                "num_bits": 8,
                "type": "float",
                "strategy": "tensor",
                "dynamic": False,
                "symmetric": True,
                "observer": "minmax",
            },
        }
    },
    "W4A16 with importance": {
        "IMatrixGatherer": {},
        "QuantizationModifier": {
            "scheme": "W4A16",
            "ignore": ["lm_head"],
            "weight_observer": "optimal",
        },
    },
    "GPTQ W4A16": gptq("W4A16"),
    "GPTQ NVFP4A16": gptq("NVFP4A16"),
}


# ---- in a subprocess ----


def work(source: str, threads: int, cases: str) -> None:
    """Run the cases with the package in `source`; `cases` is a file with recipes and outputs."""
    # the finder of an editable install would come first
    sys.meta_path[:] = [f for f in sys.meta_path if "skbc" not in type(f).__module__]
    sys.path.insert(0, source)
    import torch

    torch.set_num_threads(threads)
    import steelyard
    from steelyard.demo import calibration_texts, model_folder
    from steelyard.distributed import join_from_environment

    assert Path(steelyard.__file__).is_relative_to(source), steelyard.__file__
    join_from_environment()
    for recipe, output in json.loads(Path(cases).read_text("utf-8")):
        steelyard.oneshot(
            str(model_folder()),
            recipe,
            calibration_texts(8),
            output,
            num_calibration_samples=8,
            max_seq_length=128,
            show_progress=False,
        )


# ---- the comparison ----


def run(source: Path, ranks: int, threads: int, cases: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = []
    for rank in range(ranks):
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        if ranks > 1:
            environment |= {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "TORCHELASTIC_RUN_ID": "same-bytes",
                "GLOO_SOCKET_IFNAME": "lo",
            }
        command = [sys.executable, __file__, "--work", str(source), str(threads), str(cases)]
        processes.append(subprocess.Popen(command, env=environment))
    codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(f"{source}: {ranks} ranks with {threads} threads failed")


def tensors(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    import torch
    from safetensors import safe_open

    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                value = file.get_tensor(name).contiguous()
                raw = value.flatten().view(torch.uint8).numpy().tobytes()
                found[name] = (str(value.dtype), tuple(value.shape), raw)
    return found


def unpacked(revision: str, folder: Path) -> Path:
    """Return the package of a commit, with its kernels: built if the working tree's differ."""
    archive = ["git", "archive", revision]
    folder.mkdir()
    listed = subprocess.run(archive, cwd=ROOT, check=True, capture_output=True).stdout
    subprocess.run(["tar", "-x", "-C", str(folder)], input=listed, check=True)
    native = ("src/steelyard/kernels/native", "CMakeLists.txt")
    same = subprocess.run(["git", "diff", "--quiet", revision, "--", *native], cwd=ROOT)
    if same.returncode == 0:
        shutil.copy(kernels(), folder / "src" / "steelyard" / "kernels")
        return folder / "src"
    built = folder / "built"
    install = ["install", "-q", "--no-deps", "--target", str(built), str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return built


def kernels() -> Path:
    """Return the compiled kernels of the working tree."""
    places = (ROOT / "src", Path(sysconfig.get_paths()["platlib"]) / "steelyard")
    found = [path for place in places for path in place.rglob("_native*.so")]
    if not found:
        raise SystemExit("the kernels are not built: run `make check` once")
    return found[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("revision", nargs="?", default="HEAD", help="the commit to compare with")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    given = parser.parse_args()
    chosen = {name: recipe for name, recipe in CASES.items() if given.only in name}
    different = 0
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        now = shutil.copytree(ROOT / "src", folder / "tree-now")
        shutil.copy(kernels(), now / "steelyard" / "kernels")
        trees = {"before": unpacked(given.revision, folder / "tree-before"), "now": now}
        for ranks, threads in WORLDS:
            for when, tree in trees.items():
                outputs = folder / f"{when}-{ranks}-{threads}"
                listed = [
                    (recipe, str(outputs / str(i))) for i, recipe in enumerate(chosen.values())
                ]
                cases = folder / "cases.json"
                cases.write_text(json.dumps(listed), "utf-8")
                run(tree, ranks, threads, cases)
            for i, name in enumerate(chosen):
                old, new = (
                    tensors(folder / f"{when}-{ranks}-{threads}" / str(i)) for when in trees
                )
                changed = sorted(key for key in {**old, **new} if old.get(key) != new.get(key))
                different += bool(changed)
                verdict = f"{len(changed)} differ, such as {changed[0]}" if changed else "same"
                print(
                    f"{name}; ranks {ranks}, threads {threads}: {len(new)} tensors, {verdict}",
                    flush=True,
                )
    return 1 if different else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2], int(sys.argv[3]), sys.argv[4])
    else:
        sys.exit(main())
