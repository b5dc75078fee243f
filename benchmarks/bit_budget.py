"""KL divergence against average bits: uniform schemes, the bit budget, and AutoRound's score.

Each row is a checkpoint: one process quantizes MODEL with `oneshot`, rounded to nearest or by GPTQ,
and evaluates it on held-out samples. "budget" is `BitBudgetModifier` as it ships, measurements
included. Beside it stands the exact choice by AutoRound's score, |gradient x (w - w_q)| summed over
a unit's weights with the text as labels, computed here with the same units, schemes and solver.

    python benchmarks/bit_budget.py MODEL --text FILE [--group 32] [--samples 32] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounding import tokenize
from whole_run import processor, versions

from steelyard import oneshot
from steelyard.algorithms.bit_budget import least_loss
from steelyard.algorithms.model_pair import positions_at_once
from steelyard.algorithms.rounding_ahead import rounded_as
from steelyard.distributed import ThreadPool
from steelyard.engine.scheme_choice import chosen_recipe
from steelyard.evaluate import evaluate
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.source import Source
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.plan.budget_units import budget_units
from steelyard.plan.plan import make_plan

WIDTHS = [4, 5, 6, 8, 16]
EVERYWHERE = [4, 8, 16]  # that vLLM serves on every device
ROUNDING = {"nearest": QuantizationModifier, "GPTQ": GPTQModifier}


def absolute_scores(model: LayerwiseModel, rows: list, schemes: dict, pool: ThreadPool) -> dict:
    """Return AutoRound's score of each module and scheme: the sum of |gradient x (w - w_q)|."""
    names = {module: name for name, module in model.source.model.named_modules()}

    @contextlib.contextmanager
    def weights(root: Any, without: Any) -> Any:
        found = []
        for module in root.modules() if not len(without) else ():
            name = names[module]
            if name not in schemes:
                continue
            kept = module.weight
            changes = [
                rounded_as({name: s}, {name: module}, model.source.dtype)[name] - kept.data
                for s in schemes[name]
            ]

            def reduce(gradient: Any, changes: Any = changes) -> Any:
                return torch.stack([(gradient * c).abs().sum().double() for c in changes])

            module.weight = torch.nn.Parameter(kept.data)
            found.append((module, kept, Wanted(name, module.weight, reduce)))
        try:
            yield [wanted for *_, wanted in found]
        finally:
            for module, kept, _ in found:
                module.weight = kept

    samples = [Trace(row) for row in rows]
    plain, probing = LayerGradients(model, pool), LayerGradients(model, pool, weights)
    with HiddenStates(Room()) as held:
        plain.forward(samples, held, True, lambda share: None)
        seeds = []
        with plain.head():
            for sample in samples:

                def loss(logits: Any, positions: slice, ids: Any = sample.inputs) -> Any:
                    labels = ids["input_ids"][0, positions.start + 1 : positions.stop + 1]
                    log_p = logits[0, : len(labels)].log_softmax(-1)
                    return -log_p.gather(-1, labels[:, None]).sum()

                seeds.append(plain.through_head(sample, (), loss, positions_at_once(model))[1])
        return probing.backward(samples, seeds, lambda share: None)


def quantized(options: argparse.Namespace, recipe: Any, tokens: dict[str, Any]) -> dict[str, Any]:
    """Quantize and evaluate; return the divergence, the CPU time, and the choice in words."""
    with tempfile.TemporaryDirectory() as folder:
        out, cpu = Path(folder) / "q", time.process_time()
        size = {"num_calibration_samples": options.samples, "max_seq_length": 4096}
        result = oneshot(str(options.model), recipe, tokens["calibration"], out, **size)
        spent = time.process_time() - cpu
        found = evaluate(str(options.model), out, tokens["same"], num_samples=options.held_out)
    chosen = [note for note in result.notes if note.startswith(("bit budget", "KL divergence"))]
    return {
        "kl": found.kl_divergence,
        "error": found.kl_error,
        "tokens": found.tokens,
        "cpu_seconds": spent,
        "chosen": chosen,
    }


def measure(
    options: argparse.Namespace, tokens: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Call `save` with the results so far after each row."""
    found: dict[str, Any] = {"rows": []}
    common = {"scheme": "W4A16", "group_size": options.group, "ignore": ["lm_head"]}

    def add(name: str, widths: list[int], bits: float, rounding: str, recipe: Any) -> None:
        row = {"choice": name, "widths": widths, "bits": bits, "rounding": rounding}
        row |= quantized(options, recipe, tokens)
        found["rows"].append(row)
        save(found)
        shown = f"{row['kl']:.5f} ± {row['error']:.5f}, {row['cpu_seconds']:.0f} s of CPU"
        print(f"{name:12} {widths!s:20} {bits:5} {rounding:8} {shown}", flush=True)

    for rounding in options.rounding:
        kind = ROUNDING[rounding]
        for bits in options.uniform:
            add("uniform", [bits], bits, rounding, kind(num_bits=bits, **common))
        for bits in options.sizes:
            budget = [BitBudgetModifier(bits=bits), kind(**common)]
            add("budget", WIDTHS, bits, rounding, budget)
        for bits in options.everywhere:
            budget = [BitBudgetModifier(bits=bits, bit_widths=EVERYWHERE), kind(**common)]
            add("budget", EVERYWHERE, bits, rounding, budget)
    if not options.autoround:
        return
    rows = [{"input_ids": torch.tensor([each])} for each in tokens["calibration"]]
    source = Source.open(str(options.model))
    plan = make_plan(source.model, modifiers=[GPTQModifier(**common)])
    units = budget_units(plan, BitBudgetModifier(bits=4.5, bit_widths=WIDTHS), source.model)
    schemes = {n: [s for s in u.schemes if s is not None] for u in units for n in u.names}
    scores = absolute_scores(LayerwiseModel(source, "base"), rows, schemes, ThreadPool(1))
    sums = [sum(scores[n] for n in unit.names) for unit in units]
    losses = [[*each.tolist(), 0.0] for each in sums]
    total = sum(unit.weights for unit in units)
    for rounding in options.rounding:
        for bits in options.autoround:
            chosen = least_loss([u.costs for u in units], losses, int(bits * total))
            picked = [(unit, unit.schemes[k]) for unit, k in zip(units, chosen, strict=True)]
            recipe = chosen_recipe([ROUNDING[rounding](**common)], picked)
            add("AutoRound's", WIDTHS, bits, rounding, recipe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--sizes", type=float, nargs="*", default=[4.5, 5.0, 6.0])
    parser.add_argument("--everywhere", type=float, nargs="*", default=[4.5])
    parser.add_argument("--autoround", type=float, nargs="*", default=[4.5, 5.0, 6.0])
    parser.add_argument("--uniform", type=int, nargs="*", default=[4, 5, 6])
    parser.add_argument("--rounding", nargs="*", choices=ROUNDING, default=list(ROUNDING))
    parser.add_argument("--held-out", type=int, default=8, help="samples to measure on")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tokens.json"
        tokenize(str(options.model), options.text, "-", str(options.samples), str(file))
        tokens = json.loads(file.read_text())
    outcome = {
        "model": options.model.name,
        "group": options.group,
        "samples": options.samples,
        "held_out": options.held_out,
        "tokens": len(tokens["calibration"][0]),
        "machine": {"processor": processor(), "threads": 1},
        "versions": versions("torch", "transformers", "compressed-tensors"),
    }

    def save(results: dict[str, Any]) -> None:
        if options.json:
            options.json.write_text(json.dumps({**outcome, "results": results}, indent=1) + "\n")

    measure(options, tokens, save)


if __name__ == "__main__":
    main()
