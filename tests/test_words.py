"""Numbers of things in words, and that messages use them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from families import small_model

from steelyard import oneshot
from steelyard.modifiers import QuantizationModifier
from steelyard.words import count

SOURCE = Path(__file__).parents[1] / "src" / "steelyard"


@pytest.mark.parametrize(
    ("amount", "said"), [(0, "0 modules"), (1, "1 module"), (2, "2 modules"), (-1, "-1 modules")]
)
def test_one_is_singular(amount: int, said: str) -> None:
    assert count(amount, "module") == said


def test_a_plan_and_a_result_of_one_module_speak_of_one() -> None:
    recipe = QuantizationModifier(scheme="FP8", targets=["re:.*layers.0.mlp.down_proj"])
    data = [torch.arange(80)[None] % 100 + 3]
    result = oneshot(small_model("llama"), recipe, data, show_progress=False)
    texts = [repr(result), repr(result.plan), str(result), str(result.plan), *result.notes]
    assert any("1 module" in text for text in texts)
    assert any("1 sample with 80 tokens" in text for text in texts)
    assert not any(re.search(r"\b1 (modules|samples|weights|errors|warnings)\b", t) for t in texts)


def test_no_message_counts_modules_by_itself() -> None:
    """`count` does; only numbers that are known to be more than one are written out."""
    written = re.compile(r"\{len\([^{}]*\)\} (modules|weights|attention modules|files|samples)\b")
    found = [
        f"{path.name}: {match[0]}"
        for path in SOURCE.rglob("*.py")
        for line in path.read_text("utf-8").splitlines()
        if (match := written.search(line)) and not re.search(r"> 1|== 1", line)
    ]
    assert found == []
