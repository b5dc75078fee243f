"""GPTQ and importance beside llm-compressor and AutoRound: whole runs, and what the model lost.

Each run is a process of its own that writes a checkpoint from the same folder with the same
calibration tokens; sides take turns. The weights of each checkpoint, decoded by compressed-tensors,
are then put into one fp32 model and compared with the original on held-out samples of the
calibration's domain and of another. Standard errors are over samples; a draw is a part of the text
that another draw does not calibrate on.

    python benchmarks/gptq.py MODEL --text FILE [--other FILE] --python OURS --peer-python PEER
                              [--tuner-python AUTOROUND] [--draws 3] [--rows NAME ...] [--json FILE]
    python benchmarks/gptq.py MODEL ...          # without --text: what the model itself writes

With `--json`, runs that the file already has are not repeated, so a long table can be measured in
parts; delete the file to measure anew.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from whole_run import asked, beginning, least, mean_and_error, measured, processor, versions

SAMPLES, LENGTH, EVALUATED = 64, 512, 16
HELD_OUT, OTHER = 6_000_000, 100_000  # where evaluation begins, in characters
TUNER_STEPS = 50
TUNED = {"iters": TUNER_STEPS, "batch_size": 4}  # half as many samples as AutoRound's steps
E4M3 = "torch.float8_e4m3fn"


def integers(bits: int, group: int) -> dict[str, Any]:
    return {"num_bits": bits, "strategy": "group", "group_size": group}


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
NVFP4 |= {"scale_dtype": E4M3, "zp_dtype": E4M3}
MXFP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}
MXFP4 |= {"scale_dtype": "torch.uint8", "zp_dtype": "torch.uint8"}


def rows(group: int) -> dict[str, dict[str, Any]]:
    """Return per row: the modifier, the type of weights, and each side's observer or scheme."""
    gptq = {"modifier": "GPTQModifier", "ours": "optimal"}
    tuned = {"modifier": "AutoRoundModifier", "ours": "optimal", "options": TUNED}
    weighed = {**gptq, "options": {"token_weights": True}}
    return {
        "W4A16 GPTQ": {
            **gptq,
            "weights": integers(4, group),
            "peer": "memoryless_minmax",
        },
        "W4A16 GPTQ, the same scales": {
            **gptq,
            "weights": integers(4, group),
            "peer": "memoryless_minmax",
            "ours": "memoryless_minmax",
        },
        "W4A16 GPTQ with importance": {
            **gptq,
            "weights": integers(4, group),
            "peer": "imatrix_mse",
            "tuner": {"scheme": "W4A16", "group_size": group},
        },
        "W4A16 importance only": {
            "modifier": "QuantizationModifier",
            "gathers": True,
            "weights": integers(4, group),
            "peer": "imatrix_mse",
            "ours": "optimal",
        },
        "W3A16 GPTQ with importance": {
            **gptq,
            "weights": integers(3, group),
            "peer": "imatrix_mse",
            "tuner": {"scheme": "W3A16", "group_size": group},
        },
        "W4A16 GPTQ, tuned": {**tuned, "weights": integers(4, group)},
        "W3A16 GPTQ, tuned": {**tuned, "weights": integers(3, group)},
        "NVFP4A16 GPTQ": {
            **gptq,
            "weights": NVFP4,
            "peer": "memoryless_minmax",
            "tuner": {"scheme": "NVFP4", "act_bits": 16},
        },
        "MXFP4A16 GPTQ": {
            **gptq,
            "weights": MXFP4,
            "peer": "memoryless_minmax",
            "tuner": {"scheme": "MXFP4", "act_bits": 16},
        },
        "W4A16 GPTQ, token weights": {**weighed, "weights": integers(4, group)},
        "W3A16 GPTQ, token weights": {**weighed, "weights": integers(3, group)},
        "NVFP4A16 GPTQ, token weights": {**weighed, "weights": NVFP4},
        "MXFP4A16 GPTQ, token weights": {**weighed, "weights": MXFP4},
        "MXFP4A16 min-max": {
            "modifier": "QuantizationModifier",
            "weights": MXFP4,
            "ours": "memoryless_minmax",
        },
    }


# ---- in a process of its own ----


def run_side(side: str, name: str, group: str, model: str, tokens: str, output: str) -> None:
    import torch

    row = rows(int(group))[name]
    samples = [{"input_ids": torch.tensor(r)} for r in json.loads(Path(tokens).read_text())]
    data = torch.utils.data.DataLoader(samples, batch_size=1)
    length = len(samples[0]["input_ids"])
    if side == "tuner":
        tune(model, row["tuner"], data, len(samples), length, output)
        return
    if side == "peer":
        from llmcompressor import oneshot
        from llmcompressor.modifiers import gptq, quantization

        known = {**vars(quantization), **vars(gptq)}
    else:
        from steelyard import modifiers, oneshot
        from steelyard.modifiers.autoround import AutoRoundModifier

        known = {**vars(modifiers), "AutoRoundModifier": AutoRoundModifier}
    scheme = {"targets": ["Linear"], "weights": row["weights"] | {"observer": row[side]}}
    options = row.get("options", {})
    main = known[row["modifier"]](config_groups={"group_0": scheme}, ignore=["lm_head"], **options)
    gathers = side == "ours" and row.get("gathers")  # the peer's observer gathers unasked
    gatherer = [known["IMatrixGatherer"]()] if gathers else []
    oneshot(
        model=model,
        recipe=[*gatherer, main],
        output_dir=output,
        dataset=data,
        num_calibration_samples=len(samples),
        max_seq_length=length,
    )


def tune(
    model: str, scheme: dict[str, Any], data: Any, samples: int, length: int, output: str
) -> None:
    """Let AutoRound quantize, and store the weights as it reconstructs them, in bf16.

    Its format "fake" would store those of before.
    """
    from auto_round import AutoRound
    from safetensors.torch import save_file
    from torch.nn import Linear
    from transformers import AutoTokenizer

    size = {"iters": TUNER_STEPS, "nsamples": samples, "seqlen": length}
    tokenizer = AutoTokenizer.from_pretrained(model)
    tuner = AutoRound(model, tokenizer, dataset=data, **size, **scheme, device_map="cpu")
    quantized, _ = tuner.quantize()
    layers = {n: m for n, m in quantized.named_modules() if isinstance(m, Linear)}
    linear = {n.removesuffix(".orig_layer"): m.weight for n, m in layers.items()}
    linear.pop("lm_head", None)
    Path(output).mkdir()
    save_file(
        {f"{name}.weight": weight.detach().contiguous() for name, weight in linear.items()},
        Path(output) / "model.safetensors",
    )


def import_side(side: str, *_: str) -> None:
    import transformers  # noqa: F401

    if side == "peer":
        import llmcompressor.modifiers.gptq  # noqa: F401
    elif side == "tuner":
        import auto_round  # noqa: F401
    else:
        from steelyard import modifiers, oneshot  # noqa: F401


def tokenize(model: str, text: str, other: str, draws: str, samples: str, output: str) -> None:
    """Write rows to calibrate with, for each draw, and rows of each text to evaluate on."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    positions = AutoConfig.from_pretrained(model).max_position_embeddings
    length, count, number = min(LENGTH, positions), int(samples), int(draws)
    if text == "-":
        writer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        torch.manual_seed(0)
        start = torch.full((EVALUATED + number * count, 1), writer.config.bos_token_id)
        size = {"max_new_tokens": length - 1, "min_new_tokens": length - 1}
        mask = torch.ones_like(start)
        ids = writer.generate(start, attention_mask=mask, do_sample=True, top_k=0, **size).tolist()
        held_out = {"own text": ids[:EVALUATED]}
        parts = [ids[EVALUATED + i * count :][:count] for i in range(number)]
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        begin = beginning(model, tokenizer)
        size = length - len(begin)

        def pieces(file: str, offset: int, many: int) -> list[list[int]]:
            prose = Path(file).read_text(encoding="utf-8")[offset : offset + 10 * many * length]
            ids = tokenizer(prose, add_special_tokens=False)["input_ids"]
            return [begin + ids[i * size : (i + 1) * size] for i in range(many)]

        parts = [pieces(text, i * HELD_OUT // 6, count) for i in range(number)]
        held_out = {"same domain": pieces(text, HELD_OUT, EVALUATED)}
        if other != "-":
            held_out["other domain"] = pieces(other, OTHER, EVALUATED)
    for i, part in enumerate(parts):
        Path(f"{output}-{i}.json").write_text(json.dumps(part))
    Path(f"{output}-held-out.json").write_text(json.dumps(held_out))


def evaluate(model: str, held_out: str, *folders: str) -> dict[str, Any]:
    """Return perplexity and KL divergence of each checkpoint on each text, and of the model.

    All run side by side, sample by sample: log-probabilities of all samples would not fit into
    memory with a vocabulary of 262,144 tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    texts = {k: torch.tensor(v) for k, v in json.loads(Path(held_out).read_text()).items()}
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    models = {"plain": plain}
    for folder in folders:
        models[folder] = copy.deepcopy(plain)
        put(folder, dict(models[folder].named_parameters()))

    @torch.no_grad()
    def logits(each: Any, sample: torch.Tensor) -> torch.Tensor:
        return each(sample[None]).logits[0, :-1].float()

    found: dict[str, Any] = {name: {} for name in models}
    for key, ids in texts.items():
        losses: dict[str, list[float]] = {name: [] for name in models}
        divergences: dict[str, list[float]] = {name: [] for name in models}
        for sample in ids:
            base = logits(plain, sample)
            for name, each in models.items():
                loss, off = compared(base, base if each is plain else logits(each, sample), sample)
                losses[name].append(loss)
                divergences[name].append(off)
        for name in models:
            kl, error = mean_and_error(divergences[name])
            perplexity = math.exp(sum(losses[name]) / len(losses[name]))
            found[name][key] = {"perplexity": perplexity, "kl": kl, "error": error}
    return found


def compared(base: Any, other: Any, sample: Any) -> tuple[float, float]:
    """Return the mean loss of one model's logits, and its KL divergence from another's.

    A few tokens at a time: memory for all of them is new memory, whose pages cost more than the
    arithmetic.

    base, other: (tokens - 1, vocabulary), fp32
    """
    import torch

    loss = divergence = 0.0
    for start in range(0, len(base), 16):
        rows = slice(start, start + 16)
        logp, logq = base[rows].log_softmax(-1), other[rows].log_softmax(-1)
        following = sample[1:][rows, None]
        loss -= float(logq.gather(-1, following).double().sum())
        divergence += float(torch.linalg.vecdot(logp.exp(), logp - logq).double().sum())
    return loss / len(base), divergence / len(base)


def put(folder: str, parameters: dict[str, Any]) -> None:
    """Replace quantized weights by those that a checkpoint stores."""
    from safetensors import safe_open

    from steelyard.checkpoint.written import WrittenCheckpoint

    if (Path(folder) / "config.json").exists():
        written = WrittenCheckpoint(Path(folder), None)
        for module in written.schemes:
            target = parameters[f"{module}.weight"].data
            for start, part in written.decode(module):
                target[start : start + len(part)] = part
        return
    with safe_open(Path(folder) / "model.safetensors", "pt") as opened:  # AutoRound's weights
        for name in opened.keys():  # noqa: SIM118
            parameters[name].data.copy_(opened.get_tensor(name))


TASKS = {
    "import": import_side,
    "run": run_side,
    "tokenize": tokenize,
    "evaluate": evaluate,
    "versions": versions,
}


# ---- the one that starts them ----


class Table:
    """Results that a file keeps, so that none is measured twice."""

    def __init__(self, file: Path | None, about: dict[str, Any]) -> None:
        self.file = file
        kept = json.loads(file.read_text()) if file and file.exists() else {}
        self.found: dict[str, Any] = {"imports": {}, "results": [], **kept, **about}

    def has(self, row: str, draw: int, side: str) -> bool:
        key = [row, draw, side]
        return any([r["row"], r["draw"], r["side"]] == key for r in self.found["results"])

    def save(self) -> None:
        if self.file:
            self.file.write_text(json.dumps(self.found, indent=1) + "\n")


def run_row(name: str, draw: int, options: argparse.Namespace, tokens: Path, table: Table) -> None:
    row, scratch = rows(options.group)[name], tokens.parent
    sides = [s for s in options.pythons if s in row and not table.has(name, draw, s)]
    outputs = {side: scratch / side for side in sides}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for side in sides * options.runs:
        shutil.rmtree(outputs[side], ignore_errors=True)
        data = f"{tokens}-{draw}.json"
        given = [side, name, options.group, options.model, data, outputs[side]]
        runs[side].append(measured([options.pythons[side], __file__, "run", *map(str, given)]))
        r = runs[side][-1]
        taken = f"{r['wall']:7.1f} s, CPU {r['cpu']:7.1f} s, peak {r['peak'] / 1e6:6.0f} MB"
        print(f"{name:<28} draw {draw} {side:<5} {taken}", flush=True)
    if not sides:
        return
    held_out = f"{tokens}-held-out.json"
    found = asked_here(options.python, "evaluate", options.model, held_out, *outputs.values())
    table.found["plain"] = found.pop("plain")
    for side in sides:
        texts = found[str(outputs[side])]
        result = {"row": name, "draw": draw, "side": side, **least(runs[side]), "texts": texts}
        table.found["results"].append(result)
        shown = (f"{k}: KL {v['kl']:.4f} ± {v['error']:.4f}" for k, v in texts.items())
        print(f"    {side:<5} {', '.join(shown)}", flush=True)
    table.save()


def asked_here(python: str, kind: str, *arguments: object) -> dict:
    return asked(python, kind, *arguments, script=__file__)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="else what the model itself writes")
    parser.add_argument("--other", type=Path, help="text of another domain to evaluate on")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--python", default=sys.executable, help="of ours")
    parser.add_argument("--peer-python", help="of llm-compressor's")
    parser.add_argument("--tuner-python", help="of AutoRound's")
    parser.add_argument("--sides", nargs="*", default=["peer", "ours", "tuner"])
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--draws", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    pythons = {"peer": options.peer_python, "ours": options.python, "tuner": options.tuner_python}
    options.pythons = {s: python for s, python in pythons.items() if python and s in options.sides}
    packages = {"peer": "llmcompressor", "ours": "torch", "tuner": "auto-round"}
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens"
        given = [options.text or "-", options.other or "-", options.draws, options.samples, tokens]
        asked_here(options.python, "tokenize", options.model, *given)
        calibration = json.loads(Path(f"{tokens}-0.json").read_text())
        about = {
            "model": options.model.name,
            "group": options.group,
            "calibration": f"{len(calibration)} x {len(calibration[0])} tokens",
            "evaluation": f"{EVALUATED} x {len(calibration[0])} tokens of each text",
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)),
            "tuner steps": TUNER_STEPS,
        }
        table = Table(options.json, about)
        for side, python in options.pythons.items():
            table.found.setdefault("versions", {})[side] = asked_here(
                python, "versions", packages[side]
            )
            if side not in table.found["imports"]:
                alone = [measured([python, __file__, "import", side]) for _ in range(2)]
                table.found["imports"][side] = least(alone)
        for draw in range(options.draws):
            for name in options.rows or list(rows(options.group)):
                run_row(name, draw, options, tokens, table)


if __name__ == "__main__":
    main()
