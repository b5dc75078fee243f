"""A checkpoint from file to file, beside copying it, and beside llm-compressor's `model_free_ptq`.

A synthetic checkpoint in the shapes of an 8-billion Llama (bf16, sharded) is quantized in several
schemes. "Copy" is the same path with nothing to quantize: read, write, wait for the disk, read
back. The peer takes minutes for each gigabyte, so it runs on a smaller checkpoint of the same
layers, and ours runs there too, in turn. Each run is a process; imports are not counted. Without
the peer, the file of `--json` keeps what it says of both on the smaller checkpoint.

    python benchmarks/streaming.py --python OURS --peer-python PEER [--gigabytes 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whole_run import cpu_features, processor, versions

HIDDEN, INNER, KEYS, VOCABULARY = 4096, 14336, 1024, 32064
SHARD = 2 * 10**9
COPY = "copy"


def weights(**options: object) -> dict:
    return {"targets": ["Linear"], "weights": options}


def int4(observer: str) -> dict:
    return weights(num_bits=4, strategy="group", group_size=128, observer=observer)


E4M3 = "torch.float8_e4m3fn"
NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


def fp8(observer: str) -> dict:
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True}
    scheme = weights(num_bits=8, type="float", strategy="channel", observer=observer)
    return {**scheme, "input_activations": inputs}


def nvfp4(observer: str) -> dict:
    return weights(**NVFP4, scale_dtype=E4M3, zp_dtype=E4M3, observer=observer)


CASES: dict[str, dict | None] = {
    COPY: None,
    "W4A16, memoryless_minmax": int4("memoryless_minmax"),
    "W4A16, memoryless_mse": int4("memoryless_mse"),
    "W4A16, optimal": int4("optimal"),
    "FP8_DYNAMIC, memoryless_minmax": fp8("memoryless_minmax"),
    "FP8_DYNAMIC, optimal": fp8("optimal"),
    "NVFP4A16, memoryless_minmax": nvfp4("memoryless_minmax"),
    "NVFP4A16, optimal": nvfp4("optimal"),
}
WANTED = {"W4A16, memoryless_minmax": 1.5, "W4A16, memoryless_mse": 4.0, "W4A16, optimal": 3.0}
WITHOUT_PEER = {COPY, *(name for name in CASES if name.endswith("optimal"))}


# ---- in a process of its own ----


def make(folder: str, gigabytes: str) -> None:
    """Write a checkpoint; its values repeat, its shapes are real."""
    import torch
    from safetensors.torch import save_file

    out = Path(folder)
    out.mkdir(parents=True)
    noise = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0))
    noise = noise.mul_(0.02).to(torch.bfloat16)

    def weight(rows: int, columns: int, seed: int) -> torch.Tensor:
        start = (seed * 7919) % (1 << 20)
        count = rows * columns
        repeated = noise.repeat(-(-(start + count) // len(noise)))
        return repeated[start : start + count].view(rows, columns).clone()

    shapes = {
        "self_attn.q_proj": (HIDDEN, HIDDEN),
        "self_attn.k_proj": (KEYS, HIDDEN),
        "self_attn.v_proj": (KEYS, HIDDEN),
        "self_attn.o_proj": (HIDDEN, HIDDEN),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
    }
    ends = 4 * VOCABULARY * HIDDEN  # bytes of embedding and head
    per_layer = 2 * sum(rows * columns for rows, columns in shapes.values())
    layers = max(1, round((float(gigabytes) * 1e9 - ends) / per_layer))
    sizes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCABULARY, HIDDEN)}
    for i in range(layers):
        for name in ("input_layernorm", "post_attention_layernorm"):
            sizes[f"model.layers.{i}.{name}.weight"] = (HIDDEN,)
        sizes.update({f"model.layers.{i}.{n}.weight": shape for n, shape in shapes.items()})
    sizes.update({"model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)})

    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in sizes.items():
        nbytes = 2 * torch.Size(shape).numel()
        if size + nbytes > SHARD:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += nbytes
    index = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {
            name: weight(*sizes[name], seed=i)
            if len(sizes[name]) == 2
            else torch.ones(sizes[name], dtype=torch.bfloat16)
            for i, name in enumerate(names)
        }
        save_file(tensors, out / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(names, file))
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": layers,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": VOCABULARY,
        "dtype": "bfloat16",
        "tie_word_embeddings": False,
    }
    (out / "config.json").write_text(json.dumps(config))


def run(side: str, name: str, source: str, output: str) -> None:
    """Do one case; print what it took."""
    import torch

    torch.set_num_threads(os.cpu_count() or 1)
    work = {"peer": peer, "ours": ours}[side](name, source, output)
    before = resource.getrusage(resource.RUSAGE_SELF)
    started = time.perf_counter()
    work()
    wall = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    found = {
        "wall": wall,
        "cpu": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "peak": after.ru_maxrss * 1024,
        "imports": before.ru_maxrss * 1024,
    }
    print(json.dumps(found))


def ours(name: str, source: str, output: str):
    from steelyard import oneshot
    from steelyard.checkpoint import CheckpointView, CheckpointWriter
    from steelyard.engine.stream import Stream
    from steelyard.modifiers import QuantizationModifier
    from steelyard.plan.plan import Plan

    scheme = CASES[name]
    if scheme is not None:
        recipe = QuantizationModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
        return lambda: oneshot(source, recipe, output_dir=output)

    def copy() -> None:
        with CheckpointView(source) as view, CheckpointWriter(output, source=view) as writer:
            Stream(view, Plan(None), writer, {}, dict).run({})
            writer.carry(view)
            writer.finish(view.config)

    return copy


def peer(name: str, source: str, output: str):
    from compressed_tensors.quantization import QuantizationScheme
    from llmcompressor import model_free_ptq

    scheme = QuantizationScheme.model_validate(CASES[name])
    options = {"ignore": ["lm_head"], "max_workers": os.cpu_count() or 1, "device": "cpu"}
    return lambda: model_free_ptq(source, output, scheme, **options)


TASKS = {
    "make": make,
    "run": run,
    "versions": lambda *names: print(json.dumps(versions(*names))),
    "features": lambda: print(json.dumps(cpu_features())),
}


# ---- the one that starts them ----


def started(python: str, kind: str, *arguments: object) -> Any:
    environment = {**os.environ, "OMP_WAIT_POLICY": "passive", "HF_HUB_OFFLINE": "1"}
    command = [python, __file__, kind, *map(str, arguments)]
    os.sync()  # or a run waits for the last one's files too
    found = subprocess.run(
        command, env=environment, check=True, text=True, stdout=subprocess.PIPE
    ).stdout.splitlines()
    return json.loads(found[-1]) if found else {}


def measured(python: str, side: str, name: str, source: Path, output: Path, count: int) -> dict:
    runs = []
    for _ in range(count):
        shutil.rmtree(output, ignore_errors=True)
        runs.append(started(python, "run", side, name, source, output))
        r = runs[-1]
        print(
            f"{source.name:<8} {name:<26} {side:<5} {r['wall']:7.1f} s, CPU {r['cpu']:7.1f} s, "
            f"peak {r['peak'] / 1e6:5.0f} MB",
            flush=True,
        )
    shutil.rmtree(output, ignore_errors=True)
    return {key: min(r[key] for r in runs) for key in runs[0]}


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        TASKS[sys.argv[1]](*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", default=sys.executable, help="of ours")
    parser.add_argument("--peer-python", help="of llm-compressor's; without, it is left out")
    parser.add_argument("--gigabytes", type=float, default=8)
    parser.add_argument("--peer-gigabytes", type=float, default=1.0)
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--cases", nargs="*", default=list(CASES))
    parser.add_argument("--folder", type=Path, help="where there is room; else a temporary one")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    machine = {"processor": processor(), "cores": os.cpu_count(), "load": os.getloadavg()}
    machine["features"] = started(options.python, "features")
    print(machine["processor"], *machine["features"], "load", *machine["load"], flush=True)
    before = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        large, small = Path(folder) / "large", Path(folder) / "small"
        output = Path(folder) / "out"
        started(options.python, "make", large, options.gigabytes)
        results = dict(before.get("results", {}))
        for name in options.cases:
            found = measured(options.python, "ours", name, large, output, options.runs)
            results[name] = {**results.get(name, {}), "ours": found}
        sizes = {**before.get("sizes", {}), "large": size_of(large)}
        shutil.rmtree(large)
        if options.peer_python:
            started(options.python, "make", small, options.peer_gigabytes)
            sizes["small"] = size_of(small)
            for name in options.cases:
                if name not in WITHOUT_PEER:
                    both = {"ours": options.python, "peer": options.peer_python}
                    results[name]["small"] = {
                        side: measured(python, side, name, small, output, 1)
                        for side, python in both.items()
                    }
    outcome = {
        "sizes": sizes,
        "wanted": WANTED,
        "machine": machine,
        "versions": started(options.python, "versions", "torch", "compressed-tensors"),
        "results": {name: results[name] for name in CASES if name in results},
    }
    if "peer" in before:
        outcome["peer"] = before["peer"]
    if options.peer_python:
        outcome["peer"] = started(options.peer_python, "versions", "llmcompressor")
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
