"""Runs of fp32 models whose Linear layers multiply in bf16: one answer, near that of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_same_tensors, read, small_model, token_batches

from steelyard import oneshot
from steelyard.model import precision
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, Modifier, QuantizationModifier

STATIC: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}
GROUPS: dict[str, Any] = {"scheme": "W4A16", "group_size": 16, "ignore": ["lm_head"]}


def recipes() -> dict[str, list[Modifier]]:
    static = QuantizationModifier(config_groups={"group_0": STATIC}, ignore=["lm_head"])
    importance = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**GROUPS)]
    return {"gptq": [GPTQModifier(**GROUPS)], "static": [static], "importance": importance}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bf16 faster; torch computes the products on any."""
    monkeypatch.setenv("STEELYARD_FORWARD", "auto")
    monkeypatch.setattr(precision, "_fast", lambda stored: "as the test says")


def run(source: Path, output: Path, recipe: str, threads: int = 1) -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = [{"input_ids": batch} for batch in token_batches()]
        return oneshot(source, recipes()[recipe], data, output)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("recipe", list(recipes()))
def test_a_run_in_bf16_products(
    family: str, recipe: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small_model(family, torch.float32).save_pretrained(tmp_path / "m")
    wide = run(tmp_path / "m", tmp_path / "wide", recipe)
    request.getfixturevalue("fast")
    narrow = run(tmp_path / "m", tmp_path / "narrow", recipe)
    run(tmp_path / "m", tmp_path / "threads", recipe, threads=3)
    assert_same_tensors(tmp_path / "narrow", tmp_path / "threads")
    words = "products of Linear layers in bfloat16, as the test says"
    assert words in str(narrow.plan) and words not in str(wide.plan)
    one, other = read(tmp_path / "wide"), read(tmp_path / "narrow")
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {
        n: (t.shape, t.dtype) for n, t in other.items()
    }
    assert any(not torch.equal(one[n], other[n]) for n in one)
    for name, module in wide.modules.items():
        before, after = (each.modules[name].error for each in (wide, narrow))
        assert module.error is not None and after == pytest.approx(before, rel=0.2)
