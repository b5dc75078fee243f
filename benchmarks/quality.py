"""What each observer does to a real model: error of the weights, perplexity, KL divergence.

Rows of llm-compressor's own observers stand beside ours, from the same run: the same bf16 weights,
the same calibration tokens, the same evaluation. Weights are reconstructed from the parameters that
an observer returns and put into an fp32 model; nothing else is quantized.

    python benchmarks/quality.py MODEL --text FILE [--groups 64,32] [--json FILE]
    python benchmarks/quality.py MODEL --own-samples      # text that the model itself writes

With `--norms`, only the exponents of `optimal` without data are compared with `memoryless_mse`, on
one text or several; scales of int4 may be negative, as in recipes. That needs no llm-compressor:

    python benchmarks/quality.py MODEL --norms 2,2.4,3 --text FILE FILE --formats int4-64,NVFP4
                                 [--length 512] [--evaluated 8] [--json FILE]
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import warnings
from pathlib import Path

import torch
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import fake_quantize
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging
from whole_run import beginning

from steelyard import Observer

SAMPLES, LENGTH = 64, 256
EVALUATED = 16

ROWS: list[tuple[str, str, str, bool, dict[str, object]]] = [
    # label, whose, observer, with importance, options
    ("llm-compressor memoryless_minmax", "peer", "memoryless_minmax", False, {}),
    ("llm-compressor memoryless_mse", "peer", "memoryless_mse", False, {}),
    ("llm-compressor imatrix_mse", "peer", "imatrix_mse", True, {}),
    ("memoryless_minmax", "ours", "memoryless_minmax", False, {}),
    ("memoryless_mse", "ours", "memoryless_mse", False, {}),
    ("optimal", "ours", "optimal", False, {}),
    ("optimal, negative scales", "ours", "optimal", False, {"negative_scales": True}),
    ("imatrix_mse", "ours", "imatrix_mse", True, {}),
    ("optimal with importance", "ours", "optimal", True, {}),
    ("optimal with importance, negative", "ours", "optimal", True, {"negative_scales": True}),
]


def tokens_of(model, tokenizer, text: Path | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Calibration and evaluation tokens, (samples, LENGTH) each."""
    if text is None:
        torch.manual_seed(0)
        start = torch.full((SAMPLES + EVALUATED, 1), tokenizer.bos_token_id)
        written = model.generate(
            start, do_sample=True, max_new_tokens=LENGTH - 1, min_new_tokens=LENGTH - 1, top_k=0
        )
        return written[:SAMPLES], written[SAMPLES:]
    prose = text.read_text(encoding="utf-8")
    parts = []
    for offset, count in ((0, SAMPLES), (6_000_000, EVALUATED)):
        ids = tokenizer(prose[offset : offset + 8 * count * LENGTH], return_tensors="pt").input_ids
        parts.append(ids[0, : count * LENGTH].reshape(count, LENGTH))
    return parts[0], parts[1]


@torch.no_grad()
def gather_importance(model, layers: dict, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Mean square of the input of each layer, per channel."""
    observers = {}
    args = QuantizationArgs(num_bits=4, strategy="channel")
    for name, layer in layers.items():
        observers[name] = Observer.load_from_registry("optimal", base_name="weight", args=args)
        observers[name].attach(layer)
    for batch in tokens.split(8):
        model(batch)
    found = {}
    for name, layer in layers.items():
        observers[name].detach(layer)
        found[name] = (layer._imatrix_sum.clone(), layer._imatrix_count.clone())
        del layer._imatrix_sum, layer._imatrix_count
    return found


def observer_for(whose: str, name: str, args: QuantizationArgs, options: dict, importance):
    cls = Observer
    if whose == "peer":
        from llmcompressor.observers import Observer as cls  # not in the environment of --norms
    observer = cls.load_from_registry(name, base_name="weight", args=copy.deepcopy(args), **options)
    if importance is not None:
        observer._imatrix_sum, observer._imatrix_count = (t.clone() for t in importance)
    return observer


def fuse(model, observers: dict[str, object], args: QuantizationArgs) -> None:
    """Share NVFP4's global scale as the server does; ours only, the peer has its own way."""
    if args.strategy != "tensor_group":
        return
    modules = dict(model.named_modules())
    for name, observer in observers.items():
        modules[name].weight_observer = observer
    from steelyard import fuse_weight_observers

    fuse_weight_observers(model)
    for name in observers:
        del modules[name].weight_observer


@torch.no_grad()
def quantize(model, weights: dict, args: QuantizationArgs, row, importance: dict) -> float:
    """Put reconstructed weights into the model; return their squared error over their square."""
    _, whose, name, weighed, options = row
    observers = {
        layer: observer_for(whose, name, args, options, importance[layer] if weighed else None)
        for layer in weights
    }
    if whose == "ours":
        fuse(model, observers, args)
    for layer, weight in weights.items():
        observers[layer](weight)
    modules = dict(model.named_modules())
    noise = signal = 0.0
    for layer, weight in weights.items():
        q = observers[layer].get_qparams()
        exact = weight.float()
        stored = fake_quantize(
            exact, q["scale"].float(), q["zero_point"], args, global_scale=q["global_scale"]
        )
        modules[layer].weight.copy_(stored)
        noise += float((stored - exact).square().sum())
        signal += float(exact.square().sum())
    return noise / signal


@torch.no_grad()
def evaluate(model, tokens: torch.Tensor, reference: list[torch.Tensor] | None):
    """Perplexity, mean KL divergence to the reference, and the log-probabilities themselves."""
    loss = divergence = 0.0
    kept = []
    for i, batch in enumerate(tokens.split(4)):
        logp = model(batch).logits.float().log_softmax(-1)
        loss -= float(logp[:, :-1].gather(-1, batch[:, 1:, None]).double().sum())
        if reference is None:
            kept.append(logp.half())
        else:
            base = reference[i].float()
            divergence += float((base.exp() * (base - logp)).sum(-1).double().sum())
    count = tokens.numel()
    per_token = torch.tensor(loss / (count - len(tokens)))
    return float(per_token.exp()), divergence / count, kept


def norm_samples(model, tokenizer, text: Path, count: int, length: int) -> torch.Tensor:
    """Held-out tokens, (count, length), each sample starting as the tokenizer starts a text."""
    prose = text.read_text(encoding="utf-8")
    start = min(6_000_000, len(prose) // 2)
    first = beginning(model, tokenizer)
    step = length - len(first)
    ids = tokenizer(prose[start : start + 8 * count * length], add_special_tokens=False).input_ids
    return torch.tensor([first + ids[i * step : (i + 1) * step] for i in range(count)])


@torch.no_grad()
def hidden_states(model, tokens: torch.Tensor) -> list[torch.Tensor]:
    """What the head reads of each sample, (length, hidden): far less than what it writes."""
    return [model.base_model(sample[None]).last_hidden_state[0] for sample in tokens]


@torch.no_grad()
def divergences(model, tokens: torch.Tensor, reference: list[torch.Tensor]) -> torch.Tensor:
    """KL divergence of each sample to the reference; the head is never quantized."""
    found = []
    for before, after in zip(reference, hidden_states(model, tokens), strict=True):
        total = 0.0
        for p, q in zip(before.split(64), after.split(64), strict=True):
            base, logp = (model.lm_head(h).log_softmax(-1) for h in (p, q))
            total += float((base.exp() * (base - logp)).sum(-1).double().sum())
        found.append(total / len(before))
    return torch.tensor(found, dtype=torch.float64)


def mean_and_error(values: torch.Tensor) -> list[float]:
    return [float(values.mean()), float(values.std() / math.sqrt(len(values)))]


def compare_norms(model, tokenizer, weights: dict, options: argparse.Namespace) -> dict:
    """KL divergence of `memoryless_mse`, and of `optimal` for each norm, without data.

    Samples are the same for all rows, so differences have an error of their own.
    """
    texts = {
        text.stem: norm_samples(options.model, tokenizer, text, options.evaluated, options.length)
        for text in options.text or ()
    }
    if options.own_samples:
        texts["own samples"] = tokens_of(model, tokenizer, None)[1]
    references = {text: hidden_states(model, samples) for text, samples in texts.items()}
    results = []
    for name in options.formats.split(","):
        base: dict[str, torch.Tensor] = {}
        rows: list[tuple] = [("memoryless_mse", "ours", "memoryless_mse", False, {})]
        for norm in (float(n) for n in options.norms.split(",")):
            chosen = {"norm": norm, "negative_scales": name.startswith("int4")}
            rows.append((f"norm {norm:g}", "ours", "optimal", False, chosen))
        for row in rows:
            error = quantize(model, weights, format_named(name), row, {})
            for text, samples in texts.items():
                kl = divergences(model, samples, references[text])
                base.setdefault(text, kl)
                found = {
                    "format": name.replace("-", " group "),
                    "text": text,
                    "row": row[0],
                    "error": error,
                    "kl": mean_and_error(kl),
                    "above memoryless_mse": mean_and_error(kl - base[text]),
                }
                results.append(found)
                print(json.dumps(found), flush=True)
    return {
        "model": options.model.name,
        "evaluation": "{} x {} tokens".format(*next(iter(texts.values())).shape),
        "results": results,
    }


def format_named(name: str) -> QuantizationArgs:
    """Return the weights' type: int4-64 is four bits in groups of 64, others are presets."""
    if not name.startswith("int"):
        return preset_name_to_scheme(f"{name}A16", ["Linear"]).weights
    bits, group = name.removeprefix("int").split("-")
    return QuantizationArgs(num_bits=int(bits), strategy="group", group_size=int(group))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--text", type=Path, nargs="+")
    source.add_argument("--own-samples", action="store_true")
    parser.add_argument("--groups", default="64,32")
    parser.add_argument("--norms", help="compare these exponents of optimal, without data")
    parser.add_argument("--formats", default="int4-64,int3-64,NVFP4", help="with --norms")
    parser.add_argument("--evaluated", type=int, default=EVALUATED, help="samples, with --norms")
    parser.add_argument("--length", type=int, default=LENGTH, help="of a sample, with --norms")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.bfloat16).float().eval()
    layers = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }
    weights = {name: layer.weight.detach().to(torch.bfloat16) for name, layer in layers.items()}
    if options.norms:
        outcome = compare_norms(model, tokenizer, weights, options)
        if options.json:
            options.json.write_text(json.dumps(outcome, indent=1) + "\n")
        return
    calibration, held_out = tokens_of(model, tokenizer, options.text and options.text[0])
    importance = gather_importance(model, layers, calibration)
    perplexity, _, reference = evaluate(model, held_out, None)
    print(f"{options.model.name}: {len(layers)} layers, perplexity {perplexity:.3f} in bf16")
    formats: dict[str, QuantizationArgs] = {
        f"int4 group {size}": QuantizationArgs(num_bits=4, strategy="group", group_size=int(size))
        for size in options.groups.split(",")
    }
    formats["NVFP4"] = preset_name_to_scheme("NVFP4A16", ["Linear"]).weights
    results = []
    for format_name, args in formats.items():
        for row in ROWS:
            if args.type == "float" and row[4]:
                continue
            error = quantize(model, weights, args, row, importance)
            ppl, kl, _ = evaluate(model, held_out, reference)
            results.append(
                {"format": format_name, "row": row[0], "error": error, "perplexity": ppl, "kl": kl}
            )
            print(
                f"{format_name:<14} {row[0]:<36} error {error:.6f}  ppl {ppl:8.3f}  KL {kl:.4f}",
                flush=True,
            )
    outcome = {
        "model": options.model.name,
        "calibration": f"{SAMPLES} x {LENGTH} tokens",
        "evaluation": f"{EVALUATED} x {LENGTH} tokens",
        "bf16 perplexity": perplexity,
        "results": results,
    }
    if options.json:
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
