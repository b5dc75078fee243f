"""What each part of GPTQ is worth: weights of columns and tokens, signs, drift, dampening, tuning.

Each row is a process of its own that quantizes MODEL to int4 with the same calibration tokens and
compares the decoded weights with the original, on held-out text of the calibration's domain and on
another. Without texts, the model writes its own.

    python benchmarks/rounding.py MODEL [--text FILE --other FILE] [--group 64] [--samples 64]
                                  [--rows NAME ...] [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from whole_run import asked, beginning, mean_and_error, processor, versions

EVALUATED, HELD_OUT = 8, 6_000_000  # samples of each text, and where they begin

ROWS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "as before": (
        {"drift_correction": False},
        {"negative_scales": False, "importance_power": 1.0},
    ),
    "root of E[x^2]": ({"drift_correction": False}, {"negative_scales": False}),
    "and signed scales": ({"drift_correction": False}, {}),
    "and drift correction": ({"held_out_dampening": False}, {}),
    "and held-out dampening (default)": ({}, {}),
    "and tuning, 50 steps a block": ({"iters": 50}, {}),
    "default with token weights": ({"token_weights": True}, {}),
}


# ---- in a process of its own ----


def row(model: str, group: str, name: str, tokens: str, threads: str) -> dict[str, Any]:
    import torch

    from steelyard import oneshot
    from steelyard.checkpoint.written import WrittenCheckpoint
    from steelyard.modifiers import GPTQModifier
    from steelyard.modifiers.autoround import AutoRoundModifier

    torch.set_num_threads(int(threads))
    given = json.loads(Path(tokens).read_text())
    texts = {key: torch.tensor(rows) for key, rows in given.items()}
    calibration = texts.pop("calibration")
    options, kwargs = ROWS[name]
    args = {"num_bits": 4, "strategy": "group", "group_size": int(group)}
    args |= {"observer": "optimal", "observer_kwargs": kwargs}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    modifier = AutoRoundModifier if "iters" in options else GPTQModifier
    recipe = modifier(config_groups=groups, ignore=["lm_head"], **options)
    loader = torch.utils.data.DataLoader([{"input_ids": each} for each in calibration])
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "q"
        clock, cpu = time.perf_counter(), time.process_time()
        size = {"num_calibration_samples": len(loader), "max_seq_length": calibration.shape[1]}
        oneshot(model, recipe, loader, output, **size)
        found: dict[str, Any] = {
            "seconds": time.perf_counter() - clock,
            "cpu_seconds": time.process_time() - cpu,
        }
        plain = _load(model)
        before = {key: _log_probabilities(plain, ids) for key, ids in texts.items()}
        written, parameters = WrittenCheckpoint(output, None), dict(plain.named_parameters())
        for module in written.schemes:
            target = parameters[f"{module}.weight"].data
            for start, part in written.decode(module):
                target[start : start + len(part)] = part
    for key, ids in texts.items():
        found[key] = _divergence(before[key], _log_probabilities(plain, ids))
    return found


def _load(model: str) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


def _log_probabilities(model: Any, ids: Any) -> list[Any]:
    import torch

    with torch.no_grad():
        logits = (model(each.unsqueeze(0)).logits[0, :-1] for each in ids)
        return [each.log_softmax(-1).half() for each in logits]


def _divergence(before: list[Any], after: list[Any]) -> dict[str, Any]:
    """Return the KL divergence of each sample, their mean, and its standard error."""
    means = []
    for p, q in zip(before, after, strict=True):
        p, q = p.float(), q.float()
        means.append(float((p.exp() * (p - q)).sum(-1).mean()))
    kl, error = mean_and_error(means)
    return {"kl": kl, "error": error, "samples": means}


def tokenize(model: str, text: str, other: str, samples: str, output: str) -> None:
    """Write rows to calibrate with, and rows of one or two texts to evaluate on."""
    import torch
    from transformers import AutoConfig, AutoTokenizer

    positions = AutoConfig.from_pretrained(model).max_position_embeddings
    length, count = min(512, positions), int(samples)
    found: dict[str, Any] = {}
    if text == "-":
        writer = _load(model)
        torch.manual_seed(0)
        start = torch.full((count + EVALUATED, 1), writer.config.bos_token_id)
        size = {"max_new_tokens": length - 1, "min_new_tokens": length - 1}
        mask = torch.ones_like(start)
        ids = writer.generate(start, attention_mask=mask, do_sample=True, top_k=0, **size).tolist()
        found = {"calibration": ids[:count], "own text": ids[count:]}
    else:
        tokenizer = AutoTokenizer.from_pretrained(model)
        begin = beginning(model, tokenizer)

        def rows(file: str, offset: int, many: int) -> list[list[int]]:
            size = length - len(begin)
            piece = Path(file).read_text(encoding="utf-8")[offset : offset + 10 * many * length]
            ids = tokenizer(piece, add_special_tokens=False)["input_ids"]
            return [begin + ids[i * size : (i + 1) * size] for i in range(many)]

        found = {"calibration": rows(text, 0, count), "same": rows(text, HELD_OUT, EVALUATED)}
        if other != "-":
            found["other"] = rows(other, 100_000, EVALUATED)
    Path(output).write_text(json.dumps(found))


TASKS = {"row": row, "tokenize": tokenize}


run = functools.partial(asked, sys.executable, script=__file__)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", default="-")
    parser.add_argument("--other", default="-")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tokens = Path(folder) / "tokens.json"
        run("tokenize", options.model, options.text, options.other, options.samples, tokens)
        results = {}
        for name in options.rows:
            results[name] = run("row", options.model, options.group, name, tokens, options.threads)
            texts = {key: each for key, each in results[name].items() if isinstance(each, dict)}
            shown = "  ".join(f"{k} {v['kl']:.4f} ± {v['error']:.4f}" for k, v in texts.items())
            print(f"{name:32} {shown}  CPU {results[name]['cpu_seconds']:.0f} s", flush=True)
            for key in texts if len(results) > 1 else ():
                above = [row[key]["samples"] for row in list(results.values())[-2:]]
                off = mean_and_error([b - a for a, b in zip(*above, strict=True)])
                print(f"    {key}, above the row before: {off[0]:+.4f} ± {off[1]:.4f}", flush=True)
    if options.json:
        outcome = {
            "model": options.model.name,
            "group": options.group,
            "samples": options.samples,
            "machine": {"processor": processor(), "threads": options.threads},
            "versions": versions("torch", "transformers", "compressed-tensors"),
            "results": results,
        }
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
