"""GPTQ and importance beside llm-compressor: whole runs, and what they do to the model.

Each run is a process of its own that writes a checkpoint from the same folder with the same
calibration tokens. The weights of each checkpoint, decoded by compressed-tensors, are then put into
one fp32 model, and its distribution is held against that of the weights before.

    python benchmarks/gptq.py MODEL --text FILE --python OURS --peer-python PEER [--json FILE]
    python benchmarks/gptq.py MODEL ...          # without --text: what the model itself writes
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from whole_run import asked, least, measured, processor, versions

SAMPLES, LENGTH, EVALUATED = 64, 512, 16
SIDES = ("peer", "ours")


def weights(bits: int, observer: str, group: int) -> dict:
    args = {"num_bits": bits, "strategy": "group", "group_size": group, "observer": observer}
    return {"targets": ["Linear"], "weights": args}


def nvfp4(observer: str) -> dict:
    e4m3 = "torch.float8_e4m3fn"
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    args |= {"observer": observer, "scale_dtype": e4m3, "zp_dtype": e4m3}
    return {"targets": ["Linear"], "weights": args}


def rows(group: int) -> dict[str, dict]:
    """Return per row: the modifier, whether importance is gathered, and each side's scheme."""
    return {
        "W4A16 GPTQ": {
            "modifier": "GPTQModifier",
            "peer": weights(4, "memoryless_minmax", group),
            "ours": weights(4, "optimal", group),
        },
        "W4A16 GPTQ, the same scales": {
            "modifier": "GPTQModifier",
            "peer": weights(4, "memoryless_minmax", group),
            "ours": weights(4, "memoryless_minmax", group),
        },
        "W4A16 GPTQ with importance": {
            "modifier": "GPTQModifier",
            "gathers": True,
            "peer": weights(4, "imatrix_mse", group),
            "ours": weights(4, "optimal", group),
        },
        "W4A16 importance only": {
            "modifier": "QuantizationModifier",
            "gathers": True,
            "peer": weights(4, "imatrix_mse", group),
            "ours": weights(4, "optimal", group),
        },
        "W3A16 GPTQ": {
            "modifier": "GPTQModifier",
            "peer": weights(3, "memoryless_minmax", group),
            "ours": weights(3, "optimal", group),
        },
        "NVFP4A16 GPTQ": {
            "modifier": "GPTQModifier",
            "peer": nvfp4("memoryless_minmax"),
            "ours": nvfp4("optimal"),
        },
    }


# ---- in a process of its own ----


def run_side(side: str, name: str, group: str, model: str, tokens: str, output: str) -> None:
    import torch

    if side == "peer":
        from llmcompressor import oneshot
        from llmcompressor.modifiers import gptq, quantization

        known = {**vars(quantization), **vars(gptq)}
    else:
        from steelyard import modifiers, oneshot

        known = vars(modifiers)
    row = rows(int(group))[name]
    main = known[row["modifier"]](config_groups={"group_0": row[side]}, ignore=["lm_head"])
    gathers = side == "ours" and row.get("gathers")  # the peer's observer gathers unasked
    gatherer = [known["IMatrixGatherer"]()] if gathers else []
    data = [{"input_ids": torch.tensor(r)} for r in json.loads(Path(tokens).read_text())]
    oneshot(
        model=model,
        recipe=[*gatherer, main],
        output_dir=output,
        dataset=torch.utils.data.DataLoader(data, batch_size=1),
        num_calibration_samples=SAMPLES,
        max_seq_length=LENGTH,
    )


def import_side(side: str, *_: str) -> None:
    import transformers  # noqa: F401

    if side == "peer":
        import llmcompressor.modifiers.gptq  # noqa: F401
    else:
        from steelyard import modifiers, oneshot  # noqa: F401


def tokenize(model: str, text: str, output: str) -> None:
    """Write rows to calibrate with, and rows to evaluate on."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    if text == "-":
        writer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
        torch.manual_seed(0)
        length = min(LENGTH, writer.config.max_position_embeddings)
        start = torch.full((SAMPLES + EVALUATED, 1), writer.config.bos_token_id)
        size = {"max_new_tokens": length - 1, "min_new_tokens": length - 1}
        mask = torch.ones_like(start)
        ids = writer.generate(start, attention_mask=mask, do_sample=True, top_k=0, **size).tolist()
        parts = [ids[:SAMPLES], ids[SAMPLES:]]
    else:
        prose = Path(text).read_text(encoding="utf-8")
        tokenizer = AutoTokenizer.from_pretrained(model)
        parts = []
        for offset, count in ((0, SAMPLES), (6_000_000, EVALUATED)):
            piece = prose[offset : offset + 8 * count * LENGTH]
            found = tokenizer(piece)["input_ids"][: count * LENGTH]
            parts.append([found[i : i + LENGTH] for i in range(0, len(found), LENGTH)])
    for part, name in zip(parts, ("calibration", "evaluation"), strict=True):
        Path(f"{output}-{name}.json").write_text(json.dumps(part))


def evaluate(model: str, tokens: str, *folders: str) -> dict[str, dict[str, float]]:
    """Return perplexity and mean KL divergence of each checkpoint, and of the model itself."""
    import torch
    from transformers import AutoModelForCausalLM

    from steelyard.checkpoint.written import WrittenCheckpoint

    batches = torch.tensor(json.loads(Path(tokens).read_text())).split(4)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    kept = {name: p.detach().clone() for name, p in plain.named_parameters()}

    @torch.no_grad()
    def distributions():
        for batch in batches:
            yield batch, plain(batch).logits.log_softmax(-1)

    reference = [logp.half() for _, logp in distributions()]
    found: dict[str, dict[str, float]] = {}
    for folder in ("", *folders):
        parameters = dict(plain.named_parameters())
        if folder:
            written = WrittenCheckpoint(Path(folder), None)
            for module in written.schemes:
                target = parameters[f"{module}.weight"].data
                for start, part in written.decode(module):
                    target[start : start + len(part)] = part
        loss = divergence = 0.0
        count = 0
        for (batch, logp), base in zip(distributions(), reference, strict=True):
            loss -= float(logp[:, :-1].gather(-1, batch[:, 1:, None]).double().sum())
            base = base.float()
            divergence += float((base.exp() * (base - logp)).sum(-1)[:, :-1].double().sum())
            count += batch[:, 1:].numel()
        perplexity = float(torch.tensor(loss / count).exp())
        found[folder or "plain"] = {"perplexity": perplexity, "kl": divergence / count}
        for name, value in kept.items():
            parameters[name].data.copy_(value)
    return found


TASKS = {
    "import": import_side,
    "run": run_side,
    "tokenize": tokenize,
    "evaluate": evaluate,
    "versions": versions,
}


# ---- the one that starts them ----


def run_row(name: str, options: argparse.Namespace, scratch: Path, tokens: Path) -> dict:
    pythons = {"peer": options.peer_python, "ours": options.python}
    outputs = {side: scratch / side for side in SIDES}
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for side in SIDES * options.runs:
        shutil.rmtree(outputs[side], ignore_errors=True)
        data = f"{tokens}-calibration.json"
        given = [side, name, options.group, options.model, data, outputs[side]]
        runs[side].append(measured([pythons[side], __file__, "run", *map(str, given)]))
        r = runs[side][-1]
        print(
            f"{name:<28} {side:<5} {r['wall']:7.1f} s, CPU {r['cpu']:7.1f} s, peak "
            f"{r['peak'] / 1e6:6.0f} MB",
            flush=True,
        )
    evaluation = f"{tokens}-evaluation.json"
    found = asked_here(options.python, "evaluate", options.model, evaluation, *outputs.values())
    best = {side: {**least(runs[side]), **found[str(outputs[side])]} for side in SIDES}
    for side in SIDES:
        print(f"    {side:<5} KL {best[side]['kl']:.4f}, perplexity {best[side]['perplexity']:.3f}")
    return {"row": name, **best, "plain": found["plain"]}


def asked_here(python: str, kind: str, *arguments: object) -> dict:
    return asked(python, kind, *arguments, script=__file__)


def main() -> None:
    if sys.argv[1:] and sys.argv[1] in TASKS:
        print(json.dumps(TASKS[sys.argv[1]](*sys.argv[2:])))
        return
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, help="else what the model itself writes")
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--python", default=sys.executable, help="of ours")
    parser.add_argument("--peer-python", default=sys.executable, help="of llm-compressor's")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--rows", nargs="*")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        tokens = scratch / "tokens"
        asked_here(options.python, "tokenize", options.model, options.text or "-", tokens)
        chosen = options.rows or list(rows(options.group))
        calibration = json.loads(Path(f"{tokens}-calibration.json").read_text())
        results = [run_row(name, options, scratch, tokens) for name in chosen]
        given = [options.peer_python, options.python]
        imports = {
            side: least([measured([python, __file__, "import", side]) for _ in range(2)])
            for side, python in zip(SIDES, given, strict=True)
        }
    if options.json:
        outcome = {
            "model": options.model.name,
            "group": options.group,
            "calibration": f"{len(calibration)} x {len(calibration[0])} tokens",
            "machine": {"processor": processor(), "cores": os.cpu_count()},
            "imports": imports,
            "versions": {"peer": asked_here(options.peer_python, "versions", "llmcompressor")},
            "results": results,
        }
        options.json.write_text(json.dumps(outcome, indent=1) + "\n")


if __name__ == "__main__":
    main()
