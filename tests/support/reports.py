"""Reports that no run made, of any size and with any names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from steelyard.evaluate.diagnosis import BlockCost
from steelyard.evaluate.token_figures import Continuation, TokenFigures, WorstToken
from steelyard.evaluate.verdict import Measure, Verdict
from steelyard.report import (
    CheckpointRow,
    ComparisonRow,
    ModuleReport,
    Report,
    SchemeUse,
    SkippedWeight,
    Summary,
    decibels,
)

KINDS = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
    "mlp.extra_proj",
)
HOSTILE = (
    "</script><img src=x onerror=window.hacked=1>",
    "<script>window.hacked=1</script>",
    "\"'><svg onload=window.hacked=1>",
    "{{script}} ${window.hacked=1} &lt;b&gt; \\u003c",
    "\u202egnp.\u2067evil\u2028line\u2029paragraph",
    "\U0001f9ed\U0001f469\u200d\U0001f4bb emoji",
    "__proto__",
)


def module(name: str, number: int, **changes: Any) -> ModuleReport:
    """A module whose error follows from a number: 1e-3 and up, in no order."""
    error = 1e-3 * (1 + (number * 7919) % 5003 / 5003)
    fields: dict[str, Any] = {
        "name": name,
        "kind": name,
        "depth": None,
        "expert": None,
        "shape": [64, 64],
        "scheme": "W4A16",
        "observer": "memoryless_mse",
        "bytes_before": 8192,
        "bytes_after": 2304,
        "error": error,
        "snr": decibels(error),
        "tokens": 1000 + number,
        "sampled": 4096,
        "clipped": (number * 31) % 101 / 1e4,
        "weight": {"low": -1.0, "high": 1.0, "before": [*range(48)], "after": [*range(48)]},
        "scale": {
            "count": 128,
            "negative": 0,
            "min": 1e-3,
            "median": 2e-3,
            "max": 4e-3,
            "low": -3.0,
            "high": -2.4,
            "counts": [*range(24)],
        },
    }
    return ModuleReport(**{**fields, **changes})


def summary(modules: list[ModuleReport], model: str = "a model") -> Summary:
    return Summary(
        model=model,
        schemes=[SchemeUse(label="W4A16", format="pack-quantized", modules=len(modules))],
        quantized=len(modules),
        left=0,
        weights=4096 * len(modules),
        source_bytes=10**9,
        output_bytes=3 * 10**8,
        bits_per_weight=4.5,
        bits_per_weight_overall=5.1,
        median_snr=28.0,
        worst_snr=27.0,
        worst_module=None,
        tokens=10**5,
        seconds=12.5,
        peak_memory=2 * 10**9,
        created="2026-01-01T00:00:00+00:00",
        versions={"python": "3.11"},
    )


def layered(layers: int, kinds: tuple[str, ...] = KINDS) -> Report:
    modules = [
        module(f"model.layers.{depth}.{kind}", depth * len(kinds) + place, kind=kind, depth=depth)
        for depth in range(layers)
        for place, kind in enumerate(kinds)
    ]
    return Report(summary=summary(modules), modules=modules, recipe="stage: {}\n")


def with_experts(layers: int = 3, experts: int = 5) -> Report:
    kind = "mlp.experts.*.up_proj"
    modules = [
        module(
            f"model.layers.{depth}.mlp.experts.{e}.up_proj",
            depth * experts + e,
            kind=kind,
            depth=depth,
            expert=e,
        )
        for depth in range(layers)
        for e in range(experts)
    ]
    return Report(summary=summary(modules), modules=modules)


def checkpoint(name: str, size: int, loss: float, **more: Any) -> CheckpointRow:
    """A row of a comparison of checkpoints."""
    given = {"schemes": "W4A16", "kl_p99": 3 * loss, "top1_agreement": 0.9, "verdict": "look"}
    given |= {"behind": loss, "within_noise": False, "smallest": True, "kl_error": loss / 10}
    return CheckpointRow(name=name, bytes=size, kl_divergence=loss, **{**given, **more})


def hostile(change: Callable[[str], str] = str) -> Report:
    """A report in which every text is one that must not come to life."""
    names = [change(name) for name in HOSTILE]
    modules = [
        module(n, i, kind=n, scheme=n, observer=n, details={n: n}, activations={n: [1.0, 2.0]})
        for i, n in enumerate(names)
    ]
    return Report(
        title=names[0],
        summary=summary(modules, names[0]),
        modules=modules,
        left=[SkippedWeight(name=n, shape=[2, 2], bytes=8, reason=n) for n in names],
        notes=names,
        recipe="\n".join(names),
        evaluation=dict.fromkeys(names, names[0]),
        comparison=[ComparisonRow(scheme=n, observer=n, evaluation={n: n}) for n in names],
        checkpoints=[checkpoint(n, 100 + i, 0.1, schemes=n, link=n) for i, n in enumerate(names)],
    )


def studied() -> Report:
    """A report with an evaluation: a verdict, blocks, and single tokens."""
    report = layered(5)
    modules = [
        m.model_copy(update={"output_error": e, "output_snr": decibels(e)})
        for i, m in enumerate(report.modules)
        for e in [1e-3 * (1 + (i * 7919) % 97)]
    ]
    measures = [
        Measure("kl", 0.3, 0.28, 0.32, 0.05, 0.2, "do not ship"),
        Measure("p99", 2.0, 1.5, None, 0.6, 2.5, "", 900),
        Measure("perplexity", 0.05, 0.04, 0.06, 0.03, 0.1, "look"),
        Measure("top1", 0.95, 0.94, 0.96, 0.9, 0.8, "ship"),
    ]
    gains = [0.1, 0.2, None, 0.05, 0.01]
    blocks = [
        BlockCost(f"model.layers.{i}", 0.01, gain, gain and gain / 20, ["W4A16"], ["W8A16"])
        for i, gain in enumerate(gains)
    ]
    worst = [
        WorstToken(7.5, "once upon\na", " time", " time", HOSTILE[0]),
        WorstToken(None, HOSTILE[4], "a", "b", "c"),
    ]
    assert report.summary is not None
    outputs = {
        "median_output_snr": 21.5,
        "worst_output_snr": 10.1,
        "worst_output_module": modules[3].name,
        "outputs_on": "held-out",
    }
    return report.model_copy(
        update={
            "modules": modules,
            "summary": report.summary.model_copy(update=outputs),
            "evaluation": {"kl_divergence": 0.3, "kl_error": 0.01, "loss_error": 0.1},
            "verdict": Verdict(
                "do not ship", ["KL divergence 0.3: above 0.2"], 500, None, measures
            ),
            "blocks": blocks,
            "better_recipe": "modifiers: better",
            "tokens": TokenFigures(
                -6, 2, [*range(48)], worst, [Continuation("a prompt", "one way", "another")]
            ),
        }
    )
