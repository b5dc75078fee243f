"""Models inside `fast_attention` compute what they compute outside."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import small_model
from torch.testing import assert_close
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from steelyard.kernels.masked_attention import has_attention
from steelyard.model import fast_attention as module
from steelyard.model.fast_attention import fast_attention
from steelyard.model.precision import multiplying_in

IDS = torch.arange(3, 43).reshape(2, 20)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of attention was computed in the compiled kernel."""
    calls: list[bool] = []
    compiled = module.attention

    def noted(*args: Any) -> torch.Tensor | None:
        found = compiled(*args)
        calls.append(found is not None)
        return found

    monkeypatch.setattr(module, "attention", noted)
    return calls


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("padded", [False, True])
def test_logits(family: str, padded: bool, computed: list[bool]) -> None:
    model = small_model(family)
    mask = torch.ones_like(IDS)
    if padded:
        mask[1, 15:] = 0
    with torch.no_grad():
        outside = model(IDS, attention_mask=mask).logits
        with fast_attention():
            inside = model(IDS, attention_mask=mask).logits
    assert_close(inside[mask.bool()], outside[mask.bool()], rtol=0.05, atol=0.05)
    assert computed and all(each == has_attention() for each in computed)


def test_fp32_is_left_to_torch_unless_layers_multiply_in_bf16(computed: list[bool]) -> None:
    model = small_model("llama", torch.float32)
    with torch.no_grad(), fast_attention():
        wide = model(IDS).logits
        assert not computed
        with multiplying_in(model, torch.bfloat16):
            narrow = model(IDS).logits
    assert computed
    assert_close(narrow, wide, rtol=0.05, atol=0.05)


def test_gradients_and_other_functions_are_left_to_torch(computed: list[bool]) -> None:
    model = small_model("llama")
    with fast_attention():
        model(IDS).logits.float().sum().backward()
        assert model.model.layers[0].self_attn.q_proj.weight.grad is not None
        model.config._attn_implementation = "eager"
        with torch.no_grad():
            model(IDS)
    assert not computed


def test_the_function_is_restored() -> None:
    before = ALL_ATTENTION_FUNCTIONS["sdpa"]
    with pytest.raises(KeyError), fast_attention():
        assert ALL_ATTENTION_FUNCTIONS["sdpa"] is not before
        raise KeyError
    assert ALL_ATTENTION_FUNCTIONS["sdpa"] is before
