"""Runs of fp32 models whose Linear layers multiply in bf16: one answer, near that of fp32."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_same_tensors, read, small_model, token_batches

from steelyard import oneshot
from steelyard.kernels.masked_attention import has_attention
from steelyard.model import precision
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, Modifier, QuantizationModifier
from steelyard.modifiers.autoround import AutoRoundModifier

STATIC: dict[str, Any] = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}
GROUPS: dict[str, Any] = {"scheme": "W4A16", "group_size": 16, "ignore": ["lm_head"]}


def recipes() -> dict[str, list[Modifier]]:
    static = QuantizationModifier(config_groups={"group_0": STATIC}, ignore=["lm_head"])
    importance = [IMatrixGatherer(ignore=["lm_head"]), QuantizationModifier(**GROUPS)]
    tuned = [AutoRoundModifier(**GROUPS, iters=8)]
    gptq = [GPTQModifier(**GROUPS)]
    return {"gptq": gptq, "static": [static], "importance": importance, "tuned": tuned}


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies bf16 faster; torch computes the products on any."""
    monkeypatch.setenv("STEELYARD_FORWARD", "auto")
    monkeypatch.setattr(precision, "_fast", lambda stored: "as the test says")


def run(source: Path, output: Path, recipe: str, threads: int = 1, batches: int = 0) -> Any:
    """batches: of few different tokens, which are many for a small model; 0 for `token_batches`"""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        generator = torch.Generator().manual_seed(0)
        many = [torch.randint(3, 24, (4, 24), generator=generator) for _ in range(batches)]
        data = [{"input_ids": batch} for batch in many or token_batches()]
        return oneshot(source, recipes()[recipe], data, output)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("recipe", ["gptq", "static", "importance"])
def test_a_run_in_bf16_products(
    family: str, recipe: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    small_model(family, torch.float32).save_pretrained(tmp_path / "m")
    wide = run(tmp_path / "m", tmp_path / "wide", recipe)
    request.getfixturevalue("fast")
    narrow = run(tmp_path / "m", tmp_path / "narrow", recipe)
    run(tmp_path / "m", tmp_path / "threads", recipe, threads=3)
    assert_same_tensors(tmp_path / "narrow", tmp_path / "threads")
    also = " and attention" if has_attention() else ""
    words = f"products of Linear layers{also} in bfloat16, as the test says"
    assert words in str(narrow.plan) and words not in str(wide.plan)
    one, other = read(tmp_path / "wide"), read(tmp_path / "narrow")
    assert {n: (t.shape, t.dtype) for n, t in one.items()} == {
        n: (t.shape, t.dtype) for n, t in other.items()
    }
    assert any(not torch.equal(one[n], other[n]) for n in one)
    for name, module in wide.modules.items():
        before, after = (each.modules[name].error for each in (wide, narrow))
        assert module.error is not None and after == pytest.approx(before, rel=0.2)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_tuning_in_bf16_products(
    family: str, stored: torch.dtype, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Of tuned weights, other codes are as good: the error of the block is what stays."""
    small_model(family, stored).save_pretrained(tmp_path / "m")
    wide = run(tmp_path / "m", tmp_path / "wide", "tuned", batches=12)
    request.getfixturevalue("fast")
    narrow = run(tmp_path / "m", tmp_path / "narrow", "tuned", batches=12)
    run(tmp_path / "m", tmp_path / "threads", "tuned", threads=3, batches=12)
    assert_same_tensors(tmp_path / "narrow", tmp_path / "threads")
    name = "model.layers.0.self_attn.q_proj"
    before, after = (each.modules[name].details["held_out_loss"] for each in (wide, narrow))
    assert before != after, "the products were not in bf16"
    assert after == pytest.approx(before, rel=0.1)
