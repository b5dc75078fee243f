"""What a run returns: short as a value, a table when it is printed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import small_model, token_batches

from steelyard import oneshot
from steelyard.data.samples import FEW_TOKENS
from steelyard.errors import CalibrationWarning
from steelyard.modifiers import QuantizationModifier

W8A8 = QuantizationModifier(scheme="W8A8", ignore=["lm_head"])
STATIC = QuantizationModifier(scheme="FP8", ignore=["lm_head"])


def test_repr_is_a_line(tmp_path: Path) -> None:
    model = small_model("llama")
    result = oneshot(model, W8A8, None, tmp_path / "q")
    assert repr(result) == (
        f"<Result: 21 modules of 'LlamaForCausalLM' quantized, output_dir='{tmp_path / 'q'}'>"
    )
    assert len(repr(result.plan)) < 100 and "21 modules" in repr(result.plan)


def test_printed_it_is_a_table_with_sizes_and_places(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    result = oneshot(tmp_path / "m", W8A8, None, tmp_path / "q")
    lines = str(result).splitlines()
    assert lines[0].split() == ["modules", "count", "error", "worst"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:8]}
    for leaf in ("q_proj", "k_proj", "v_proj", "o_proj"):
        names = [f"model.layers.{i}.self_attn.{leaf}" for i in range(3)]
        errors = sorted(result.modules[name].error or 0 for name in names)
        count, middle, worst = rows[f"model.layers.{{0-2}}.self_attn.{leaf}"]
        assert count == "3"
        assert [float(middle), float(worst)] == pytest.approx(errors[1:], rel=0.01)
    assert lines[8] == ""
    assert lines[9].startswith("21 modules quantized in ") and " -> " in lines[9]
    assert "not quantized: lm_head (ignored by 'lm_head')" in lines
    assert f"checkpoint: {tmp_path / 'q'}" in lines
    assert lines[-1] == f"report: {tmp_path / 'q' / 'report.html'}"
    assert all(f"warning: {warning}" in lines for warning in result.plan.warnings)


def test_printed_after_a_dry_run_it_is_the_plan() -> None:
    result = oneshot(small_model("llama"), W8A8, dry_run=True)
    assert str(result) == str(result.plan)


def test_few_tokens_are_a_warning_of_the_result() -> None:
    few = sum(batch.numel() for batch in token_batches())
    assert few < FEW_TOKENS
    result = oneshot(small_model("llama"), STATIC, token_batches())
    said = [warning for warning in result.warnings if f"calibrating on {few} tokens" in warning]
    assert len(said) == 1 and said[0] in result.notes and f"warning: {said[0]}" in str(result)
    enough = [torch.randint(3, 128, (1, FEW_TOKENS // 2)) for _ in range(2)]
    result = oneshot(small_model("llama"), STATIC, enough)
    assert not any("calibrating on" in warning for warning in result.warnings)


def test_hardly_any_token_warns_in_python_too() -> None:
    with pytest.warns(CalibrationWarning, match="calibrating on 2 tokens only") as caught:
        oneshot(small_model("llama"), STATIC, [torch.tensor([[5, 6]])])
    assert caught[0].filename == __file__
