"""KL divergence against average bits: uniform schemes, the bit budget, and other scores.

One backward pass scores all units of MODEL under all widths. For each size the exact choice is
measured with weights rounded to nearest, and for some with GPTQ. Beside it stand the choices by
AutoRound's score, |gradient x (w - w_q)| summed over a unit's weights with the text as labels
(computed here, with the same units, schemes and solver), and by weight errors alone.

    python benchmarks/bit_budget.py MODEL --text FILE [--group 32] [--samples 32] [--json FILE]
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rounding import tokenize
from whole_run import mean_and_error, processor, versions

from steelyard import oneshot
from steelyard.algorithms.assigned_schemes import AssignedSchemes
from steelyard.algorithms.bit_budget import least_loss
from steelyard.algorithms.model_pair import positions_at_once
from steelyard.algorithms.scheme_scores import gradient_scores, rounded_as
from steelyard.distributed import ThreadPool
from steelyard.engine.scheme_choice import chosen_recipe
from steelyard.evaluate import evaluate
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted
from steelyard.model.layerwise import HiddenStates, LayerwiseModel
from steelyard.model.source import Source
from steelyard.modifiers import GPTQModifier
from steelyard.modifiers.bit_budget import BitBudgetModifier
from steelyard.plan.budget_units import BudgetUnit, budget_units
from steelyard.plan.plan import make_plan

WIDTHS = [4, 5, 6, 8, 16]
SIZES = [4.25, 4.5, 5.0, 6.0, 8.0]
SCORES = ["Fisher", "AutoRound's formula", "weight error"]
SETS = {"4, 8, 16": [4, 8, 16], "4, 5, 6, 8, 16": WIDTHS}


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
    with HiddenStates(0, 1 << 40) as held:
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


def weight_errors(source: Source, units: list[BudgetUnit]) -> dict:
    found: dict = {}
    for planned in (each for unit in units for each in unit.modules):
        module = source.model.get_submodule(planned.name)
        unit = next(each for each in units if planned in each.modules)
        with source.loaded(module, planned.name):
            weight = module.weight.data.float()
            rounded = (
                rounded_as({planned.name: s}, {planned.name: module}, planned.dtype)[planned.name]
                for s in unit.schemes
                if s is not None
            )
            energy = weight.square().sum()
            lost = [((each - weight).square().sum() / energy).double() for each in rounded]
        found[planned.name] = torch.stack(lost)
    return found


def measure(
    options: argparse.Namespace, tokens: dict[str, Any], save: Callable[[dict[str, Any]], None]
) -> None:
    """Call `save` with the results so far after each row."""
    rows = [{"input_ids": torch.tensor([each])} for each in tokens["calibration"]]
    held_out = [{"input_ids": torch.tensor([each])} for each in tokens["same"]][: options.held_out]
    source = Source.open(str(options.model))
    step = GPTQModifier(scheme="W4A16", group_size=options.group, ignore=["lm_head"])
    plan = make_plan(source.model, modifiers=[step])
    units = budget_units(plan, BitBudgetModifier(bits=4.5, bit_widths=WIDTHS), source.model)
    weights = sum(unit.weights for unit in units)
    schemes = {n: [s for s in u.schemes if s is not None] for u in units for n in u.names}
    model, pool = LayerwiseModel(source, "base"), ThreadPool(1)
    found: dict[str, Any] = {"units": len(units), "rows": []}
    cpu = time.process_time()
    by_score = {"Fisher": gradient_scores(model, rows, schemes, pool, lambda share: None)}
    found["scoring_cpu_seconds"] = time.process_time() - cpu
    if "AutoRound's formula" in options.scores:
        by_score["AutoRound's formula"] = absolute_scores(model, rows, schemes, pool)
    if "weight error" in options.scores:
        by_score["weight error"] = weight_errors(source, units)
    assigned = AssignedSchemes(model, held_out, pool)
    assigned.start(lambda share: None)

    def nearest(chosen: list[int]) -> dict[str, float]:
        picked = zip(units, chosen, strict=True)
        given = {name: unit.schemes[k] for unit, k in picked for name in unit.names}
        kl, error = mean_and_error(assigned.divergences(given, lambda share: None))
        return {"kl": kl, "error": error}

    def gptq(chosen: list[int]) -> dict[str, float]:
        picked = [(unit, unit.schemes[k]) for unit, k in zip(units, chosen, strict=True)]
        recipe = chosen_recipe([step], picked)
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "q"
            size = {"num_calibration_samples": len(rows), "max_seq_length": 4096}
            oneshot(str(options.model), recipe, tokens["calibration"], out, **size)
            result = evaluate(str(options.model), out, tokens["same"], num_samples=len(held_out))
        return {"kl": result.kl_divergence, "error": result.kl_error}

    def add(name: str, allowed: str, bits: float, chosen: list[int]) -> None:
        row: dict[str, Any] = {"choice": name, "widths": allowed, "bits": bits}
        row["nearest"] = nearest(chosen)
        if bits in options.gptq and name in ("uniform", "Fisher"):
            row["gptq"] = gptq(chosen)
        found["rows"].append(row)
        save(found)
        shown = (f"{k} {row[k]['kl']:.5f} ± {row[k]['error']:.5f}" for k in row if k[0] in "ng")
        print(f"{name:20} {allowed:16} {bits:5} ", *shown, flush=True)

    for bits in options.uniform:
        add("uniform", str(bits), float(bits), [WIDTHS.index(bits)] * len(units))
    for bits, (allowed, widths) in itertools.product(options.sizes, SETS.items()):
        places = [WIDTHS.index(width) for width in widths]
        costs = [[unit.costs[k] for k in places] for unit in units]
        for name, scores in by_score.items():
            sums = [sum(scores[n] for n in unit.names) for unit in units]
            losses = [[[*each.tolist(), 0.0][k] for k in places] for each in sums]
            chosen = least_loss(costs, losses, int(bits * weights))
            add(name, allowed, bits, [places[k] for k in chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", required=True)
    parser.add_argument("--group", type=int, default=32)
    parser.add_argument("--samples", type=int, default=32)
    parser.add_argument("--sizes", type=float, nargs="*", default=SIZES)
    parser.add_argument("--uniform", type=int, nargs="*", default=WIDTHS[:-1])
    parser.add_argument("--scores", nargs="*", default=SCORES)
    parser.add_argument("--held-out", type=int, default=8, help="samples to measure on")
    parser.add_argument("--gptq", type=float, nargs="*", default=[4.0, 4.5])
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
