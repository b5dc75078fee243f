"""Small checkpoints to evaluate, and what transformers makes of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.evaluate import Evaluation
from steelyard.modifiers import QuantizationModifier
from steelyard.recipes import load_recipe


def weights(**args: Any) -> dict[str, Any]:
    return {"targets": ["Linear"], "weights": args}


def static(**activation: Any) -> dict[str, Any]:
    input_activations = {"num_bits": 8, "strategy": "tensor", **activation}
    return {**weights(num_bits=8, strategy="channel"), "input_activations": input_activations}


def samples(seed: int = 1, length: int = 24) -> list[list[int]]:
    """Token ids of several lengths; the last is too short to be scored."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [length, length, 11, length, 1]
    return [torch.randint(3, 128, (n,), generator=generator).tolist() for n in lengths]


def quantize(source: Path, output: Path, **options: Any) -> Path:
    modifier = QuantizationModifier(ignore=["lm_head", "re:.*mlp.gate$"], **options)
    oneshot(source, modifier, samples(seed=0) if load_recipe(modifier).needs_data else None, output)
    return output


def in_fp32(folder: Path, kind: Any = AutoModelForCausalLM) -> Any:
    model = kind.from_pretrained(folder, dtype=torch.float32).eval()
    for decode in list(model._forward_pre_hooks.values()):  # else done by the first call
        decode(model, ())
    return torch.nn.Module.float(model)  # codes of 4 bits are decoded to bf16


@torch.no_grad()
def oracle(
    base: Path,
    quantized: Path,
    data: list[list[int]],
    complete: Callable[[Any], None] = lambda model: None,
) -> dict[str, float]:
    """Return the numbers from whole models of transformers, in fp32.

    complete: lets the quantized one do what transformers does not
    """
    models = [in_fp32(folder) for folder in (base, quantized)]
    complete(models[1])
    return numbers(
        ([model(torch.tensor([ids])).logits[0, :-1].float() for model in models], ids[1:])
        for ids in data
    )


def numbers(compared: Iterable[tuple[list[torch.Tensor], list[int]]]) -> dict[str, float]:
    """Return the numbers of an evaluation.

    compared: logits of both models, (tokens, vocabulary) each, and the tokens that follow
    """
    losses: list[list[float]] = [[], []]
    divergences, agreements = [], []
    for logits, targets in compared:
        logs = [torch.log_softmax(one.double(), -1) for one in logits]
        for log, loss in zip(logs, losses, strict=True):
            loss += [-float(log[i, token]) for i, token in enumerate(targets)]
        divergences += (
            torch.nn.functional.kl_div(logs[1], logs[0], reduction="none", log_target=True)
            .sum(-1)
            .tolist()
        )
        agreements += (logits[0].argmax(-1) == logits[1].argmax(-1)).tolist()
    ordered = sorted(divergences)
    return {
        "tokens": len(agreements),
        "base_perplexity": math.exp(sum(losses[0]) / len(losses[0])),
        "perplexity": math.exp(sum(losses[1]) / len(losses[1])),
        "kl_divergence": sum(divergences) / len(divergences),
        "kl_p99": ordered[math.ceil(len(ordered) * 0.99) - 1],
        "kl_max": ordered[-1],
        "top1_agreement": sum(agreements) / len(agreements),
    }


def assert_equal(found: Evaluation, expected: dict[str, float], rel: float = 1e-4) -> None:
    got = {name: getattr(found, name) for name in expected}
    assert got == pytest.approx(expected, rel=rel, abs=1e-9)
