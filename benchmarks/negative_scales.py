"""Do servers reconstruct int4 weights whose scales are negative?

`write` quantizes a model twice, with and without negative scales, to pack-quantized checkpoints;
beside each it writes the same weights dense, unpacked and multiplied in numpy. It loads all of
them with transformers and compares. `serve` does the same with vLLM, which need not share an
environment with Steelyard, and prints both.

    python benchmarks/negative_scales.py write MODEL FOLDER [--group 32]
    python benchmarks/negative_scales.py serve FOLDER [--json FILE]

vLLM fuses and repacks what it loads, so its weights are read where they act: a quantized layer that
is given the rows of the identity returns its weight. Log-probabilities are those of tokens that the
model itself wrote. "sign dropped" is what a server would lose that took the scales' magnitudes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import warnings
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

KINDS = {"negative": True, "positive": False}  # checkpoint: whether scales may be negative
DTYPES = ["float32", "float16", "bfloat16"]
SERVED = ["float16", "bfloat16"]  # vLLM has no int4 kernel for fp32 on a CPU
PROMPTS, LENGTH = 8, 128
FUSED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_INT4_W4A8": "0",  # with AMX it would quantize the activations too
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the layers must be within reach
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


def reconstruct(tensors: dict[str, torch.Tensor], layer: str) -> np.ndarray:
    """Return the weight that a checkpoint's codes and scales stand for.

    A code of 4 bits times a scale of 8 significant ones: the fp32 product is exact.
    """
    words = tensors[f"{layer}.weight_packed"].numpy().view(np.uint32)
    codes = (words[..., None] >> np.arange(0, 32, 4, dtype=np.uint32)) & 15
    codes = codes.reshape(len(words), -1).astype(np.float32) - 8
    assert codes.shape == tuple(tensors[f"{layer}.weight_shape"].tolist())
    scale = tensors[f"{layer}.weight_scale"]
    assert scale.dtype == torch.bfloat16
    values = (scale.view(torch.int16).numpy().view(np.uint16).astype(np.uint32) << 16).view("f4")
    return codes * values.repeat(codes.shape[1] // values.shape[1], axis=1)


def quantized_layers(tensors: dict[str, torch.Tensor]) -> list[str]:
    return [name.removesuffix(".weight_packed") for name in tensors if "weight_packed" in name]


def difference(found: torch.Tensor, expected: np.ndarray, dtype: str) -> float:
    """Largest distance of a weight from the expected one, rounded to the type it is held in."""
    rounded = torch.from_numpy(expected).to(getattr(torch, dtype))
    assert found.dtype == rounded.dtype and found.shape == rounded.shape
    return float((found.float() - rounded.float()).abs().max())


def compare(found: list[float], expected: list[float]) -> dict[str, float]:
    distance = np.abs(np.subtract(found, expected))
    return {"mean": float(distance.mean()), "max": float(distance.max())}


# ---- write: Steelyard and transformers ----


def write_checkpoints(model, source: Path, folder: Path, kind: str, group: int) -> dict:
    """Write `folder/kind` and `folder/kind-dense`; return what there is to know of the scales."""
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
    )

    from steelyard import Observer
    from steelyard.kernels.pack import quantize_and_pack

    args = QuantizationArgs(num_bits=4, strategy="group", group_size=group)
    tensors = model.state_dict()
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    dense = {name: t.float() for name, t in tensors.items()}
    scales, signal, noise = [], 0.0, 0.0
    for layer in linear_layers(model):
        weight = tensors.pop(f"{layer}.weight")
        observer = Observer.load_from_registry(
            "optimal", base_name="weight", args=args, negative_scales=KINDS[kind]
        )
        scale, _ = observer(weight)
        tensors[f"{layer}.weight_packed"] = quantize_and_pack(weight, scale, None, args, exact=True)
        tensors[f"{layer}.weight_scale"] = scale
        tensors[f"{layer}.weight_shape"] = torch.tensor(weight.shape)
        stored = torch.from_numpy(reconstruct(tensors, layer))
        dense[f"{layer}.weight"] = stored
        scales.append(scale.flatten())
        signal += float(weight.float().square().sum())
        noise += float((stored - weight.float()).square().sum())
    quantization = QuantizationConfig(
        config_groups={"group_0": QuantizationScheme(targets=["Linear"], weights=args)},
        ignore=["lm_head"],
        format="pack-quantized",
        quantization_status="compressed",
    )
    write(tensors, source, folder / kind, "bfloat16", quantization.to_dict())
    write(dense, source, folder / f"{kind}-dense", "float32", None)
    every = torch.cat(scales)
    return {
        "layers": len(scales),
        "scales": every.numel(),
        "negative scales": int((every < 0).sum()),
        "relative squared error": noise / signal,
    }


def linear_layers(model) -> list[str]:
    modules = model.named_modules()
    return [n for n, m in modules if isinstance(m, torch.nn.Linear) and n != "lm_head"]


def write(tensors: dict, source: Path, folder: Path, dtype: str, quantization: dict | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".model") and "index" not in file.name:
            shutil.copy(file, folder)
    config = json.loads((source / "config.json").read_text()) | {"dtype": dtype}
    if quantization is not None:
        config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@torch.no_grad()
def logits_of(model, tokens: torch.Tensor) -> torch.Tensor:
    return torch.cat([model(row[None]).logits for row in tokens]).float()


def logprobs_of(logits: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])
    return chosen.flatten().tolist()


def check_transformers(folder: Path, kind: str, dtype: str, tokens: torch.Tensor) -> dict:
    """Load a checkpoint and its dense twin; compare weights, logits and log-probabilities."""
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    def load(name: str, **options):
        return AutoModelForCausalLM.from_pretrained(folder / name, dtype=dtype, **options).eval()

    tensors = load_file(folder / kind / "model.safetensors")
    expected = {layer: reconstruct(tensors, layer) for layer in quantized_layers(tensors)}
    loaded = load(kind, quantization_config=CompressedTensorsConfig(dequantize=True))
    weights = max(
        difference(loaded.get_submodule(layer).weight, weight, dtype)
        for layer, weight in expected.items()
    )
    dense = load(f"{kind}-dense")
    reference = logits_of(dense, tokens)
    result = {
        "layers": len(expected),
        "weights": weights,
        "logits": float((logits_of(loaded, tokens) - reference).abs().max()),
        "logits, decompressed by the first forward pass": float(
            (logits_of(load(kind), tokens) - reference).abs().max()
        ),
        "logprobs": logprobs_of(reference, tokens),
    }
    if KINDS[kind]:
        magnitudes = {n: t.abs() if n.endswith("_scale") else t for n, t in tensors.items()}
        for layer in expected:
            weight = torch.from_numpy(reconstruct(magnitudes, layer))
            dense.get_submodule(layer).weight.data.copy_(weight)
        dropped = logprobs_of(logits_of(dense, tokens), tokens)
        result["sign dropped"] = compare(dropped, result["logprobs"])
    return result


def write_main(options: argparse.Namespace) -> None:
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).eval()
    torch.manual_seed(0)
    start = torch.full((PROMPTS, 1), model.config.bos_token_id)
    size = {"max_new_tokens": LENGTH - 1, "min_new_tokens": LENGTH - 1}
    tokens = model.generate(start, do_sample=True, top_k=0, **size)
    outcome: dict = {
        "model": options.model.name,
        "group size": options.group,
        "versions": {n: version(n) for n in ("torch", "transformers", "compressed-tensors")},
        "tokens": tokens.tolist(),
        "scales": {},
        "transformers": {},
    }
    for kind in KINDS:
        scales = write_checkpoints(model, options.model, options.folder, kind, options.group)
        outcome["scales"][kind] = scales
        print(f"{kind}: {scales['negative scales']:,} of {scales['scales']:,} scales are negative")
        for dtype in DTYPES:
            with contextlib.redirect_stderr(io.StringIO()):  # compressed-tensors draws bars there
                found = check_transformers(options.folder, kind, dtype, tokens)
            outcome["transformers"][f"{kind} {dtype}"] = found
            print(f"  {dtype}: weights off by {found['weights']}, logits by {found['logits']}")
    (options.folder / "transformers.json").write_text(json.dumps(outcome) + "\n")


# ---- serve: vLLM ----


def acting_weights(model) -> dict[str, tuple[str, torch.Tensor]]:
    """Return the kernel and the weight of every quantized layer: its answer to the identity."""
    found = {}
    for name, module in model.named_modules():
        scheme = getattr(module, "scheme", None)
        if scheme is None:
            continue
        columns = module.input_size_per_partition
        identity = torch.eye(columns, dtype=next(iter(model.parameters())).dtype)
        weight = module.quant_method.apply(module, identity, None).T
        kernel = f"{type(scheme.kernel).__name__} {getattr(module, 'isa_hint', '')}".strip()
        found[name] = (kernel, weight.contiguous())
    return found


def run_engine(folder: Path, name: str, dtype: str, tokens: list[list[int]]) -> dict:
    """Serve a checkpoint; return log-probabilities, and of a quantized one how its weights act."""
    os.environ.update(ENGINE)
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(str(folder / name), dtype=dtype, enforce_eager=True, max_model_len=2 * LENGTH)
    asked = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": row} for row in tokens], asked, use_tqdm=False)
    result: dict = {"version": __version__, "logprobs": []}
    for row, answer in zip(tokens, answers, strict=True):
        for token, found in zip(row[1:], answer.prompt_logprobs[1:], strict=True):
            result["logprobs"].append(found[token].logprob)
    layers = llm.apply_model(acting_weights)[0]
    if layers:
        tensors = load_file(folder / name / "model.safetensors")
        result["kernels"] = sorted({kernel for kernel, _ in layers.values()})
        unseen = set(quantized_layers(tensors))
        result["layers"] = len(unseen)
        result["weights"] = 0.0
        for layer, (_, weight) in layers.items():
            parent, _, last = layer.rpartition(".")
            parts = [f"{parent}.{part}" for part in FUSED.get(last, [last])]
            expected = np.concatenate([reconstruct(tensors, part) for part in parts])
            result["weights"] = max(result["weights"], difference(weight, expected, dtype))
            unseen -= set(parts)
        assert not unseen, f"vLLM does not hold {unseen} quantized"
    return result


def serve_main(options: argparse.Namespace) -> None:
    outcome = json.loads((options.folder / "transformers.json").read_text())
    tokens = outcome.pop("tokens")
    references = {key: found.pop("logprobs") for key, found in outcome["transformers"].items()}
    outcome["evaluated"] = f"{len(tokens)} x {len(tokens[0]) - 1} tokens"
    outcome["vllm"] = {}
    # an engine leaves much behind, so each has a process of its own
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:

        def run(name: str, dtype: str) -> dict:
            return pool.submit(run_engine, options.folder, name, dtype, tokens).result()

        for key in (f"{kind} {dtype}" for kind in KINDS for dtype in SERVED):
            kind, dtype = key.split()
            packed, dense = run(kind, dtype), run(f"{kind}-dense", dtype)
            outcome["versions"]["vllm"] = packed["version"]
            outcome["vllm"][key] = {
                **{name: packed[name] for name in ("kernels", "layers", "weights")},
                "vllm dense": compare(packed["logprobs"], dense["logprobs"]),
                "transformers dense": compare(packed["logprobs"], references[key]),
                "of the dense ones": compare(dense["logprobs"], references[key]),
            }
    print_tables(outcome)
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


def print_tables(outcome: dict) -> None:
    print(f"\n{outcome['model']}, int4 in groups of {outcome['group size']}")
    for kind, scales in outcome["scales"].items():
        share = scales["negative scales"] / scales["scales"]
        error = scales["relative squared error"]
        print(f"{kind}: {share:.1%} of {scales['scales']:,} scales negative, error {error:.6f}")
    print("\ntransformers: largest difference from the dense checkpoint")
    for key, found in outcome["transformers"].items():
        print(f"{key:<18} weights {found['weights']:<8.3g} logits {found['logits']:.3g}")
    pairs = ["vllm dense", "transformers dense", "of the dense ones"]
    print("\nvLLM: largest difference of weights; mean/max difference of log-probabilities from")
    print(f"{'':<18} {'weights':>8}" + "".join(f"{pair:>20}" for pair in pairs))
    for key, found in outcome["vllm"].items():
        cells = [f"{found[pair]['mean']:.4f} / {found[pair]['max']:.3f}" for pair in pairs]
        print(f"{key:<18} {found['weights']:>8.3g}" + "".join(f"{cell:>20}" for cell in cells))
    for key, found in outcome["transformers"].items():
        if "sign dropped" in found:
            lost = found["sign dropped"]
            print(f"sign dropped, {key}: {lost['mean']:.2f} / {lost['max']:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    commands = parser.add_subparsers(required=True)
    writer = commands.add_parser("write", help="quantize, write checkpoints, check transformers")
    writer.add_argument("model", type=Path)
    writer.add_argument("folder", type=Path)
    writer.add_argument("--group", type=int, default=32)
    writer.set_defaults(run=write_main)
    server = commands.add_parser("serve", help="check vLLM on what `write` wrote")
    server.add_argument("folder", type=Path)
    server.add_argument("--json", type=Path)
    server.set_defaults(run=serve_main)
    options = parser.parse_args()
    options.run(options)


if __name__ == "__main__":
    main()
