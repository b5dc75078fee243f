"""Does vLLM serve what was written as it was meant?

A checkpoint that loads proves little: a server that misread a scale would still generate. This
quantizes a model from its folder with every scheme that vLLM serves on a CPU, and compares vLLM
with transformers and compressed-tensors on the same checkpoint in two ways:

- layer by layer: what each linear layer made of the input that it had while serving, beside what
  compressed-tensors makes of that input in fp32;
- as a whole: the log-probability of each token of held-out text, in the same type. Here rounding
  flips codes of quantized activations, and the layers behind amplify it, so it shows less.

    python benchmarks/serving.py MODEL --server PYTHON [--text FILE] [--json FILE]
                                 [--schemes NAME ...]

PYTHON is that of an environment with vLLM, which need not share one with Steelyard. Beside each
difference stands what a wrong scale does: vLLM also serves a copy in which one was doubled. With
`--schemes`, FILE keeps the others that it has.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import warnings
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

SAMPLES, SAMPLE_LENGTH = 64, 256  # to calibrate with
PROMPTS, LENGTH = 8, 128  # to compare on
ROWS = 2 * LENGTH  # to compare layers on
DENSE = "not quantized"
DAMAGED = " damaged"
AFTER = ", after "
FORMAT = {"format": "pt"}
ENGINE = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_INT4_W4A8": "0",  # with AMX it would quantize the activations of W4A16 too
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the layers must be within reach
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
}


# ---- in the server's environment ----


def kernels_of(model) -> list[str]:
    """Return the kernels that the decoder's linear layers run in."""
    found = set()
    for name, module in model.named_modules():
        if name.endswith("_proj"):
            scheme = getattr(module, "scheme", None)
            kernel = getattr(scheme, "kernel", None) or getattr(scheme, "fp8_linear", None)
            found.add(type(kernel or scheme or module.quant_method).__name__)
    return sorted(found)


def watch(model, seen: dict) -> None:
    """Let each linear layer of the decoder leave in `seen` what it is first given, and returns.

    A layer that vLLM fused is told apart again, under the names of the checkpoint.
    """
    for name, module in model.named_modules():
        if not name.endswith("_proj"):
            continue
        parent, _, last = name.rpartition(".")
        parts = [f"{parent}.{part}" for part in model.packed_modules_mapping.get(last, [last])]

        def keep(module, given, returned, parts=parts) -> None:
            if parts[0] in seen:
                return
            x, y = given[0][:ROWS].clone(), returned[0][:ROWS].clone()
            sizes = module.output_partition_sizes if len(parts) > 1 else [y.shape[-1]]
            for part, piece in zip(parts, y.split(sizes, dim=-1), strict=True):
                seen[part] = x, piece

        module.register_forward_hook(keep)


def run_engine(folder: str, layers: str, dtype: str, tokens: list[list[int]]) -> dict:
    """Serve a checkpoint; return the log-probability of every token but the first of a row.

    What the layers were given and returned is written to the file `layers`.
    """
    os.environ.update(ENGINE)
    import torch
    from vllm import LLM, SamplingParams, __version__

    llm = LLM(folder, dtype=dtype, enforce_eager=True, max_model_len=2 * LENGTH)
    seen: dict = {}
    llm.apply_model(partial(watch, seen=seen))
    wanted = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=0, detokenize=False)
    answers = llm.generate([{"prompt_token_ids": row} for row in tokens], wanted, use_tqdm=False)
    found = [
        answer.prompt_logprobs[i][row[i]].logprob
        for row, answer in zip(tokens, answers, strict=True)
        for i in range(1, len(row))
    ]
    torch.save(seen, layers)
    kernels = llm.apply_model(kernels_of)[0]
    return {"logprobs": found, "layers": layers, "kernels": kernels, "version": __version__}


def serve(asked: str, answered: str) -> None:
    """Serve each checkpoint that the file `asked` names; write to the file `answered`."""
    question = json.loads(Path(asked).read_text())
    answers = {}
    # an engine leaves much behind, so each has a process of its own
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as pool:
        for name, folder in question["folders"].items():
            layers = f"{answered}.{len(answers)}"
            run = pool.submit(run_engine, folder, layers, question["dtype"], question["tokens"])
            try:
                answers[name] = run.result()
            except Exception as error:  # the table says which one, and why
                answers[name] = {"error": f"{type(error).__name__}: {error}"}
    Path(answered).write_text(json.dumps(answers))


# ---- in Steelyard's ----


def schemes_for(config) -> dict[str, dict]:
    """Return what to give the modifier for each scheme, in group sizes that divide the model's."""
    sizes = {config.hidden_size, config.intermediate_size}
    groups = [g for g in (128, 64, 32) if all(size % g == 0 for size in sizes)]
    if not groups:
        raise SystemExit(f"no group size divides {sizes}")

    def linear(activations: dict | None = None, **weights) -> dict:
        scheme = {"targets": ["Linear"], "weights": weights}
        if activations is not None:
            scheme["input_activations"] = activations
        return {"config_groups": {"group_0": scheme}}

    def grouped(size: int, **options) -> dict:
        return {"num_bits": 4, "strategy": "group", "group_size": size, **options}

    found = {f"W4A16 group {size}": linear(**grouped(size)) for size in groups}
    if 128 not in groups and config.intermediate_size % 128 == 0:
        found[f"W4A16 group 128 for down_proj, else {groups[0]}"] = {
            "config_groups": {
                "group_0": {"targets": ["re:.*down_proj$"], "weights": grouped(128)},
                "group_1": {
                    "targets": ["re:.*(q|k|v|o|gate|up)_proj$"],
                    "weights": grouped(groups[0]),
                },
            }
        }
    found[f"W4A16 group {groups[0]}, asymmetric"] = linear(**grouped(groups[0], symmetric=False))
    found["W4A16 channel"] = linear(num_bits=4, strategy="channel")
    found["W8A16 channel"] = linear(num_bits=8, strategy="channel")
    found["W8A8, dynamic"] = {"scheme": "W8A8"}
    static = {"num_bits": 8, "strategy": "tensor", "observer": "minmax"}
    byte = {"num_bits": 8, "strategy": "channel"}
    found["W8A8, static"] = linear(static, **byte)
    found["W8A8, static asymmetric"] = linear({**static, "symmetric": False}, **byte)
    found["FP8_DYNAMIC"] = {"scheme": "FP8_DYNAMIC"}
    token = {"num_bits": 8, "strategy": "token", "dynamic": True}
    found[f"W4A8 group {groups[0]}, dynamic"] = linear(token, **grouped(groups[0]))
    return found


def steps_for(name: str, schemes: dict[str, dict]) -> tuple[list, dict, dict]:
    """Return the transforms of a row, what to give the modifier after them, and to `oneshot`."""
    from steelyard.modifiers import AWQModifier, SmoothQuantModifier, TransformModifier

    steps = {
        "SmoothQuant 0.8": SmoothQuantModifier(smoothing_strength=0.8),
        "AWQ": AWQModifier(),
        "auto": TransformModifier(),
        "auto, dynamic where needed": TransformModifier(),
    }
    scheme, _, step = name.partition(AFTER)
    more = {"uncalibratable": "dynamic"} if step.endswith("where needed") else {}
    return [steps[step]] if step else [], schemes[scheme], more


def rows_for(schemes: dict[str, dict]) -> list[str]:
    """Return all rows: each scheme, and some after a transform."""
    group = next(iter(schemes))
    return [
        *schemes,
        f"{group}{AFTER}AWQ",
        f"W8A8, dynamic{AFTER}SmoothQuant 0.8",
        f"W8A8, static{AFTER}SmoothQuant 0.8",
        f"W8A8, static{AFTER}auto",
        f"W8A8, static{AFTER}auto, dynamic where needed",
    ]


def tokens_for(model: Path, text: Path | None):
    """Return the tokens to calibrate with, and those to compare on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if text is None:  # what the model itself writes
        writer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        torch.manual_seed(0)
        start = torch.full((SAMPLES + PROMPTS, 1), writer.config.bos_token_id)
        size = {"max_new_tokens": SAMPLE_LENGTH - 1, "min_new_tokens": SAMPLE_LENGTH - 1}
        mask = torch.ones_like(start)
        written = writer.generate(start, attention_mask=mask, do_sample=True, top_k=0, **size)
        return written[:SAMPLES], written[SAMPLES:, :LENGTH]
    prose = text.read_text(encoding="utf-8")
    tokenizer = AutoTokenizer.from_pretrained(model)
    parts = []
    for offset, count, length in ((0, SAMPLES, SAMPLE_LENGTH), (6_000_000, PROMPTS, LENGTH)):
        piece = prose[offset : offset + 8 * count * length]
        ids = tokenizer(piece, return_tensors="pt").input_ids[0, : count * length]
        parts.append(ids.reshape(count, length))
    return parts[0], parts[1]


def logprobs_of(model, tokens) -> list[float]:
    """Return what transformers gives, as `run_engine` does for vLLM."""
    import torch

    with torch.no_grad():
        logits = torch.cat([model(row[None]).logits for row in tokens]).float()
    chosen = logits.log_softmax(-1)[:, :-1].gather(-1, tokens[:, 1:, None])
    return chosen.flatten().tolist()


def rounded_as_vllm_does(x, layer):
    """Return the inputs of a layer with vLLM's rounding, where it has a way of its own.

    The checkpoint leaves the scale of dynamic activations to the server. compressed-tensors takes
    the largest magnitude / 127.5. vLLM's int8 kernel takes it / 127, and the kernel that it has for
    int4 weights on a CPU quantizes asymmetrically, whatever the checkpoint says.
    """
    from compressed_tensors.quantization import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp

    scheme = getattr(layer, "quantization_scheme", None)
    args = scheme.input_activations if scheme else None
    if args is None or not args.dynamic or args.type != "int":
        return None
    if scheme.weights.num_bits == 4:
        args = args.model_copy(update={"symmetric": False})
    scale, zero_point = compute_dynamic_scales_and_zp(x, args, layer)
    if args.symmetric:
        scale = scale * (127.5 / 127)
    return fake_quantize(x, scale, zero_point, args)


def layer_errors(model, file: str) -> tuple[dict[str, float], dict[str, float]]:
    """Return how far vLLM's layers are off: |y - expected| / |expected|, the mean over tokens.

    `model` is the checkpoint in fp32, decompressed. The second is the same with vLLM's rounding of
    the inputs, for the layers where that is another.
    """
    import torch
    from torch.nn.functional import linear

    seen = torch.load(file)
    if missed := {n for n, _ in model.named_modules() if n.endswith("_proj")} ^ seen.keys():
        raise SystemExit(f"not in both engines: {sorted(missed)}")

    def off(y, expected) -> float:
        distance = (y - expected).norm(dim=-1)
        ratio = (distance / expected.norm(dim=-1)).masked_fill(distance == 0, 0)
        return float(ratio.nan_to_num(nan=float("inf")).mean())  # max() would pass over a NaN

    plain, adapted = {}, {}
    with torch.no_grad():
        for name, (x, y) in seen.items():
            layer, x = model.get_submodule(name), x.float()[None]  # (1, tokens, features)
            plain[name] = off(y.float(), layer(x)[0])
            if (rounded := rounded_as_vllm_does(x, layer)) is not None:
                adapted[name] = off(y.float(), linear(rounded, layer.weight, layer.bias)[0])
    return plain, adapted


def scales_to_double(layers: int) -> dict[str, str]:
    """Return a scale of a weight, and one that static activations have, from the middle."""
    middle = f"model.layers.{layers // 2}"
    return {
        "weight": f"{middle}.mlp.down_proj.weight_scale",
        "input": f"{middle}.self_attn.o_proj.input_scale",
    }


def damage(folder: Path, layers: int) -> Path:
    """Write a copy in which those scales are doubled; return its folder."""
    from safetensors.torch import load_file, save_file

    target = folder.with_name(folder.name + DAMAGED)
    shutil.copytree(folder, target)
    wanted = scales_to_double(layers)
    doubled = set()
    for file in target.glob("*.safetensors"):
        tensors = load_file(file)
        here = tensors.keys() & wanted.values()
        save_file({n: t * 2 if n in here else t for n, t in tensors.items()}, file, FORMAT)
        doubled |= here
    if wanted["weight"] not in doubled:
        raise SystemExit(f"{folder} has no {wanted['weight']}")
    return target


def compare(found: list[float], expected: list[float]) -> dict[str, float]:
    distances = [abs(a - b) for a, b in zip(found, expected, strict=True)]
    return {"mean": sum(distances) / len(distances), "max": max(distances)}


def compare_engines(folder: Path, served: dict, harmed: dict | None, tokens, dtype: str) -> dict:
    """Return how what vLLM did differs from what transformers and compressed-tensors do."""
    from transformers import AutoModelForCausalLM

    def load(dtype: str):
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    expected = logprobs_of(load(dtype), tokens)
    wide = load("float32")
    result = {
        "kernels": served["kernels"],
        "difference": compare(served["logprobs"], expected),
        "rounding": compare(expected, logprobs_of(wide, tokens)),  # this decompresses as well
    }
    plain, adapted = layer_errors(wide, served["layers"])
    result["layers"] = {"count": len(plain), "worst": max(plain, key=plain.__getitem__)}
    result["layers"]["off"] = max(plain.values())
    if adapted:
        result["layers"]["off with vLLM's rounding"] = max(adapted.values())
    if harmed:
        result["damaged"] = compare(harmed["logprobs"], expected)
        off, _ = layer_errors(wide, harmed["layers"])
        for kind, scale in scales_to_double(wide.config.num_hidden_layers).items():
            name = scale.rpartition(".")[0]
            if hasattr(wide.get_submodule(name), f"{kind}_scale"):
                result["layers"][f"off, {kind} scale doubled"] = off[name]
    return result


def run(options: argparse.Namespace, scratch: Path) -> dict:
    from importlib.metadata import version

    from transformers import AutoConfig
    from transformers.utils import logging

    from steelyard import oneshot
    from steelyard.modifiers import QuantizationModifier
    from steelyard.recipes import load_recipe

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(options.model)
    calibration, tokens = tokens_for(options.model, options.text)
    folders = {DENSE: options.model.resolve()}
    schemes = schemes_for(config)
    for name in rows_for(schemes):
        if options.schemes and name not in options.schemes:
            continue
        print(f"quantizing: {name}", file=sys.stderr)
        steps, scheme, more = steps_for(name, schemes)
        recipe = [*steps, QuantizationModifier(ignore=["lm_head"], **scheme)]
        data = calibration if load_recipe(recipe).needs_data else None
        folder = scratch / f"{len(folders):02}"
        oneshot(options.model, recipe, data, folder, show_progress=False, **more)
        folders[name] = folder
        folders[name + DAMAGED] = damage(folder, config.num_hidden_layers)
    question, answer = scratch / "question.json", scratch / "answer.json"
    content = {"folders": {n: str(f) for n, f in folders.items()}, "dtype": options.dtype}
    question.write_text(json.dumps({**content, "tokens": tokens.tolist()}))
    print(f"serving {len(folders)} checkpoints", file=sys.stderr)
    with (scratch / "log").open("w+") as log:
        command = [options.server, __file__, "serve", str(question), str(answer)]
        if subprocess.run(command, stdout=log, stderr=log).returncode:
            log.seek(0)
            raise SystemExit(log.read())
    answers = json.loads(answer.read_text())
    results = []
    for name, folder in folders.items():
        if name.endswith(DAMAGED):
            continue
        result = {"scheme": name}
        results.append(result)
        if "error" in answers[name]:
            result["error"] = answers[name]["error"]
            continue
        harmed = answers.get(name + DAMAGED)
        with contextlib.redirect_stderr(io.StringIO()):  # bars are drawn there
            result |= compare_engines(folder, answers[name], harmed, tokens, options.dtype)
    return {
        "model": options.model.name,
        "dtype": options.dtype,
        "calibration": f"{SAMPLES} x {SAMPLE_LENGTH} tokens",
        "evaluated": f"{PROMPTS} x {LENGTH - 1} tokens",
        "layers on": f"{ROWS} tokens",
        "versions": {
            "vllm": answers[DENSE]["version"],
            **{n: version(n) for n in ("torch", "transformers", "compressed-tensors")},
        },
        "results": results,
    }


def print_table(outcome: dict) -> None:
    layers = ["off", "off with vLLM's rounding", "off, weight scale doubled"]
    layers.append("off, input scale doubled")
    columns = ["difference", "rounding", "damaged"]
    print(f"{outcome['model']}, {outcome['dtype']}; worst layer, then log-probabilities")
    for r in outcome["results"]:
        if "error" in r:
            print(f"{r['scheme']:<38} {r['error']}")
            continue
        cells = [f"{r['layers'][c]:.3%}" if c in r["layers"] else "" for c in layers]
        cells += [f"{r[c]['mean']:.4f} / {r[c]['max']:.3f}" if c in r else "" for c in columns]
        print(f"{r['scheme']:<38}" + "".join(f"{cell:>17}" for cell in cells))


def main() -> None:
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--server", required=True, help="python of an environment with vLLM")
    parser.add_argument("--text", type=Path, help="else the model writes text of its own")
    # vLLM's static int8 kernel is a thousand times slower in float16
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16"])
    parser.add_argument("--schemes", nargs="*", help="rows to measure; all by default")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(options, Path(folder))
    print_table(outcome)
    if options.json:
        if options.schemes and options.json.exists():
            measured = {r["scheme"] for r in outcome["results"]}
            kept = json.loads(options.json.read_text())["results"]
            kept = [r for r in kept if r["scheme"] not in measured]
            outcome["results"] = [*kept, *outcome["results"]]
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
