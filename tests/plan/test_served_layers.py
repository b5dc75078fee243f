"""Layers that vLLM's classes cannot take in some scheme: the plan says so before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from expert_families import expert_model, saved

from steelyard import oneshot
from steelyard.errors import PlanError
from steelyard.modifiers import QuantizationModifier

DATA = [torch.arange(3, 19), torch.arange(20, 36)]
EXPERTS = r"re:.*\.experts\..*"


def planned(model: Any, scheme: str, *ignore: str) -> Any:
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head", *ignore])
    return oneshot(model, recipe, DATA, dry_run=True).plan


@pytest.mark.parametrize("as_folder", [True, False])
def test_granite_hybrid_has_no_place_for_global_scales_of_inputs(
    as_folder: bool, tmp_path: Path
) -> None:
    family = "granitemoehybrid"
    model = saved(family, tmp_path / "m") if as_folder else expert_model(family, torch.bfloat16)
    with pytest.raises(PlanError, match=r"layers\.0\.block_sparse_moe.*input_global_scale.*A16"):
        oneshot(
            model,
            QuantizationModifier(scheme="NVFP4", ignore=["lm_head"]),
            DATA,
            tmp_path / "q",
        )
    assert planned(model, "NVFP4", EXPERTS).quantized, "the rest of the model has a place"
    assert planned(model, "NVFP4A16").quantized
    assert planned(model, "FP8").quantized


def test_other_classes_have_one(tmp_path: Path) -> None:
    assert planned(saved("granitemoe", tmp_path / "m"), "NVFP4").quantized


def test_mixers_that_vllm_does_not_quantize_are_warned_of(tmp_path: Path) -> None:
    model = saved("jamba", tmp_path / "m")

    def warned(*ignore: str) -> list[str]:
        plan = planned(model, "FP8_DYNAMIC", *ignore)
        return [text for text in plan.warnings if "Mamba" in text]

    (text,) = warned("re:.*dt_proj")
    assert r"'re:.*\.mamba\..*' to ignore" in text and "model.layers.0.mamba.in_proj" in text
    assert not warned(r"re:.*\.mamba\..*"), "the remedy works"


def test_mixers_of_mamba_2_are_served(tmp_path: Path) -> None:
    plan = planned(saved("granitemoehybrid", tmp_path / "m"), "FP8_DYNAMIC")
    assert any(".mamba.in_proj" in planned.name for planned in plan.quantized)
    assert not any("Mamba" in text for text in plan.warnings)
