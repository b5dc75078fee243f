"""Memory of a calibrated run on a mixture of experts that is larger than the memory it may take.

A synthetic Qwen3-MoE in bf16 (its values repeat, its shapes are real) is quantized with GPTQ to
W4A16 from its folder. The run is a process of its own; its peak includes Python and the libraries.

    python benchmarks/experts_memory.py [--layers 20] [--samples 16] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from whole_run import processor, versions

HIDDEN, INNER, EXPERTS, ACTIVE, VOCABULARY = 1024, 512, 64, 8, 8192
LIMIT = 1.5e9  # bytes
TOKENS = 128  # of a sample


# ---- in a process of its own ----


def make(folder: str, layers: str) -> None:
    """Write the checkpoint, a shard for each layer."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen3MoeConfig

    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        moe_intermediate_size=INNER,
        num_hidden_layers=int(layers),
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=EXPERTS,
        num_experts_per_tok=ACTIVE,
        norm_topk_prob=True,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    noise = torch.randn(HIDDEN * VOCABULARY).mul_(0.03).bfloat16()

    def matrix(rows: int, columns: int, start: int) -> torch.Tensor:
        return noise.roll(start)[: rows * columns].reshape(rows, columns).clone()

    index: dict[str, str] = {}

    def write(file: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, Path(folder) / file, metadata={"format": "pt"})
        index.update(dict.fromkeys(tensors, file))

    ones = torch.ones(HIDDEN).bfloat16()
    write(
        "model-outside.safetensors",
        {
            "model.embed_tokens.weight": matrix(VOCABULARY, HIDDEN, 0),
            "lm_head.weight": matrix(VOCABULARY, HIDDEN, 7),
            "model.norm.weight": ones,
        },
    )
    for layer in range(int(layers)):
        name = f"model.layers.{layer}"
        rows = {"q_proj": 1024, "k_proj": 256, "v_proj": 256}
        tensors = {
            f"{name}.self_attn.{leaf}.weight": matrix(count, HIDDEN, layer + i)
            for i, (leaf, count) in enumerate(rows.items())
        }
        tensors[f"{name}.self_attn.o_proj.weight"] = matrix(HIDDEN, 1024, layer)
        for leaf in ("q_norm", "k_norm"):
            tensors[f"{name}.self_attn.{leaf}.weight"] = torch.ones(64).bfloat16()
        for leaf in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{name}.{leaf}.weight"] = ones.clone()
        tensors[f"{name}.mlp.gate.weight"] = matrix(EXPERTS, HIDDEN, 3 * layer)
        for expert in range(EXPERTS):
            start = 1000 * layer + 17 * expert
            place = f"{name}.mlp.experts.{expert}"
            tensors[f"{place}.gate_proj.weight"] = matrix(INNER, HIDDEN, start)
            tensors[f"{place}.up_proj.weight"] = matrix(INNER, HIDDEN, start + 5)
            tensors[f"{place}.down_proj.weight"] = matrix(HIDDEN, INNER, start + 11)
        write(f"model-{layer:03}.safetensors", tensors)
    content = {"metadata": {}, "weight_map": index}
    (Path(folder) / "model.safetensors.index.json").write_text(json.dumps(content))


def measure(folder: str, output: str, samples: str) -> None:
    """Quantize, and print what it took."""
    import torch

    from steelyard import oneshot
    from steelyard.modifiers import GPTQModifier

    torch.set_num_threads(2)
    generator = torch.Generator().manual_seed(0)
    data = torch.randint(0, VOCABULARY, (int(samples), TOKENS), generator=generator)
    imported = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    started = time.perf_counter()
    recipe = GPTQModifier(scheme="W4A16", ignore=["lm_head"])
    result = oneshot(folder, recipe, list(data), output, show_progress=False)
    found = {
        "seconds": time.perf_counter() - started,
        "imported_bytes": imported,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "modules": len(result.modules),
    }
    print(json.dumps(found))


# ---- here ----


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(dir=options.folder))
    try:
        (work / "m").mkdir()
        call("make", str(work / "m"), str(options.layers))
        size = sum(file.stat().st_size for file in (work / "m").glob("*.safetensors"))
        found = json.loads(call("measure", str(work / "m"), str(work / "q"), str(options.samples)))
    finally:
        shutil.rmtree(work)
    found |= {
        "model_bytes": size,
        "processor": processor(),
        "versions": versions("torch", "transformers"),
    }
    print(json.dumps(found, indent=2))
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if found["peak_bytes"] > LIMIT:
        raise SystemExit(f"peak {found['peak_bytes'] / 1e9:.2f} GB, above {LIMIT / 1e9} GB")


def call(*words: str) -> str:
    command = [sys.executable, __file__, "--in-process", *words]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return done.stdout.splitlines()[-1] if done.stdout else ""


if __name__ == "__main__":
    if sys.argv[1:2] == ["--in-process"]:
        {"make": make, "measure": measure}[sys.argv[2]](*sys.argv[3:])
    else:
        main()
