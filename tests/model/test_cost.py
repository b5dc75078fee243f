"""Costs: operations as torch counts them, and steps that add up to the total."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model
from torch.utils.flop_counter import FlopCounterMode

from steelyard.evaluate import divergence as compare
from steelyard.model.cost import Costs


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_layers_cost_what_torch_counts(family: str) -> None:
    model = small_model(family, hidden_size=128, intermediate_size=512).eval()
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")  # whose operations torch counts
    costs = Costs(model, model.model.layers, 8)
    counter = FlopCounterMode(display=False)
    with counter, torch.no_grad():
        model(torch.arange(3, 11).reshape(1, 8))
    counted: dict[str, Any] = counter.get_flop_counts()
    for index in range(len(model.model.layers)):
        flops = sum(counted[f"{type(model).__name__}.model.layers.{index}"].values())
        assert costs.layer(index, 8) == pytest.approx(flops, rel=0.1)


def test_steps_add_up_to_the_total(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done before the last step of a bar is all but that step."""
    small_model("llama").save_pretrained(tmp_path)
    steps: list[float] = []
    totals: list[float] = []
    progress = compare.progress

    def recorded(label: str, total: float, *given: Any, **more: Any) -> Any:
        totals.append(total)
        context = progress(label, total, *given, **more)
        context.gen = _recording(context.gen, steps)
        return context

    monkeypatch.setattr(compare, "progress", recorded)
    data = [list(range(3, 20)), list(range(5, 12))]
    compare.evaluate(tmp_path, tmp_path, data)
    assert sum(steps) == pytest.approx(totals[0], rel=1e-9)
    assert min(steps) > 0


def _recording(generator: Any, steps: list[float]) -> Any:
    advance = next(generator)

    def record(amount: float, where: str = "") -> None:
        steps.append(amount)
        advance(amount, where)

    yield record
    yield from generator
