"""The first tokens of a layer's call, against the layer run with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import small_model
from torch.nn import Module

from steelyard.model.first_tokens import first_tokens


def calls_of(model: Any, ids: torch.Tensor) -> list[tuple[Module, Any, torch.Tensor]]:
    """Return each decoder layer of a model, its arguments, and its output."""
    found: list[tuple[Module, Any, torch.Tensor]] = []

    def called(layer: Module, args: Any, kwargs: Any, out: Any) -> None:
        found.append((layer, (args, dict(kwargs)), out))

    handles = [
        layer.register_forward_hook(called, with_kwargs=True) for layer in model.model.layers
    ]
    with torch.no_grad():
        model(ids, use_cache=False)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "gemma3", "phi3"])
@pytest.mark.parametrize("samples", [1, 3])
def test_a_causal_layer_puts_out_the_same(family: str, samples: int) -> None:
    model = small_model(family, torch.float32).eval()
    ids = torch.randint(3, 100, (samples, 60), generator=torch.Generator().manual_seed(1))
    for layer, call, out in calls_of(model, ids):
        args, kwargs = first_tokens(call, 24)
        with torch.no_grad():
            found = layer(*args, **kwargs)
        found, out = (each[0] if isinstance(each, tuple) else each for each in (found, out))
        assert found.shape[:2] == (samples, 24 // samples)
        torch.testing.assert_close(found, out[:, : 24 // samples], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "shape, most",
    [
        ((1, 15, 4), 8),  # less than twice as many tokens
        ((9, 16, 4), 8),  # more samples than tokens to keep
        ((1, 16, 16), 4),  # which dimension is that of tokens?
        ((16, 16, 4), 16),
        ((16, 4), 4),
    ],
)
def test_what_cannot_be_cut(shape: tuple[int, ...], most: int) -> None:
    assert first_tokens(((torch.zeros(shape),), {}), most) is None


def test_a_call_without_tensors() -> None:
    assert first_tokens(((), {"mask": None}), 4) is None


def test_other_tensors_stay() -> None:
    hidden, other = torch.zeros(1, 16, 4), torch.ones(1, 10, 3)
    args, kwargs = first_tokens(((hidden,), {"encoder": other, "flag": True, "pair": [None]}), 8)
    assert args[0].shape == (1, 8, 4)
    assert kwargs["encoder"] is other and kwargs["flag"] is True and kwargs["pair"] == [None]
