"""A trained mixture of experts: what calibration that follows the router is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from steelyard import oneshot
from steelyard.demo import calibration_texts, held_out_texts
from steelyard.evaluate import evaluate
from steelyard.model.experts import Experts
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.observers.routing import RoutedInputs

MODEL = Path(__file__).parents[1] / "support" / "expert_model"


def divergence(modifier: Any, output: Path, **options: Any) -> float:
    oneshot(MODEL, modifier, output_dir=output, max_seq_length=256, **options)
    texts = held_out_texts(16)
    return evaluate(MODEL, output, texts, max_seq_length=256).kl_divergence


def every_token(self: Experts, *given: Any, inputs: Any = Experts._inputs) -> RoutedInputs:
    """Show each expert every token, with equal weights."""
    routed = inputs(self, *given)
    return RoutedInputs(routed.shape, routed.everyone, lambda number: None, routed.everyone)


def test_gptq_halves_the_loss_and_gains_from_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"scheme": "W4A16", "ignore": ["lm_head"]}
    data = calibration_texts(32)
    nearest = divergence(QuantizationModifier(**options), tmp_path / "nearest")
    routed = divergence(GPTQModifier(**options), tmp_path / "routed", dataset=data)
    assert routed <= nearest / 2
    monkeypatch.setattr(Experts, "_inputs", every_token)
    every = divergence(GPTQModifier(**options), tmp_path / "every", dataset=data)
    assert routed < every
