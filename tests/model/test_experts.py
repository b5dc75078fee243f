"""Stacked experts as Linear layers compute what the class computes, from a module and a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from block_runs import run_in_sequence
from expert_families import EXPERT_FAMILIES, expert_model
from families import read, token_batches
from torch.testing import assert_close

from steelyard.model.experts import Experts
from steelyard.model.source import Source
from steelyard.model.unstacking import unstack
from steelyard.observers.padding import without_padding
from steelyard.observers.routing import RoutedInputs, routing_points


def experts_of(model: Any) -> dict[str, Experts]:
    return {name: m for name, m in model.named_modules() if isinstance(m, Experts)}


@torch.no_grad()
@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_logits_are_those_of_the_class(family: str) -> None:
    model, ids = expert_model(family, torch.float64), token_batches()[0]
    before = model(ids).logits
    storages = {p.untyped_storage().data_ptr() for p in model.parameters()}
    names = set(model.state_dict())
    stacks = unstack(model)
    assert experts_of(model).keys() == {stack.name for stack in stacks}
    assert len(stacks) in (1, 2)
    assert not any(p.ndim == 3 and "experts" in n for n, p in model.named_parameters())
    assert_close(model(ids).logits, before, rtol=1e-10, atol=1e-10)
    assert {p.untyped_storage().data_ptr() for p in model.parameters()} <= storages, "a copy"
    for stack in stacks:
        stack.put_back()
    assert set(model.state_dict()) == names
    assert torch.equal(model(ids).logits, before)


@pytest.mark.parametrize("family", EXPERT_FAMILIES)
def test_folder_gives_the_logits_of_the_class(family: str, tmp_path: Path) -> None:
    """Each expert is read from the files, whether they stack experts or not."""
    model, batches = expert_model(family), token_batches()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    with torch.no_grad():
        expected = [model(ids, use_cache=False).logits for ids in batches]
    source = Source.open(tmp_path)
    assert experts_of(source.model)
    assert not source.in_memory, "the model was loaded as a whole"
    found = run_in_sequence(source, batches)
    for one, other in zip(found, expected, strict=True):
        assert_close(one.logits, other, rtol=1e-4, atol=1e-4)
    assert not source.in_memory, "weights were kept"
    check_names(model, source, tmp_path)


def check_names(model: Any, source: Source, folder: Path) -> None:
    """A module says the same names as a folder, and they are those of the files."""
    keys = {own: key for stack in unstack(model) for own, key in stack.keys.items()}
    assert keys.keys() == {n for n in model.state_dict() if ".experts." in n}
    stored, view = read(folder), source.shards
    assert view is not None
    if not any(tensor.ndim == 3 and "conv" not in name for name, tensor in stored.items()):
        assert set(keys.values()) <= stored.keys()
    for own, key in keys.items():
        assert source.keys[own] == key
        assert view.info(key).shape == tuple(model.get_parameter(own).shape)
        assert torch.equal(view.read(key), model.get_parameter(own))


def test_error_puts_the_stacks_back() -> None:
    model = expert_model("qwen3_moe")
    source = Source.open(model)
    before = dict(model.named_parameters())
    with pytest.raises(RuntimeError, match="in between"), source.unstacked():
        assert experts_of(model)
        raise RuntimeError("in between")
    assert not experts_of(model)
    assert all(p is before[name] for name, p in model.named_parameters())


# -- routing ------------------------------------------------------------------------------------


def routed(model: Any, ids: torch.Tensor) -> list[RoutedInputs]:
    found: list[RoutedInputs] = []
    handles = [
        point.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        for point in routing_points(model)
    ]
    with torch.no_grad():
        model(ids)
    for handle in handles:
        handle.remove()
    return found


@pytest.mark.parametrize("family", ["mixtral", "llama4_text"])
def test_experts_see_their_own_tokens(family: str) -> None:
    model, ids = expert_model(family, torch.float64), token_batches()[0]
    unstack(model)
    per_token = model.config.num_experts_per_tok
    points = routed(model, ids)
    assert len(points) == 4  # before gate and up, and before down, of two layers
    for entry, middle in zip(points[::2], points[1::2], strict=True):
        tokens = [entry.tokens(number) for number in range(4)]
        assert sum(len(x) for x in tokens if x is not None) == per_token * ids.numel()
        for number, x in enumerate(tokens):
            inner = middle.tokens(number)
            assert (x is None) == (inner is None)
            if x is not None and inner is not None:
                assert len(x) == len(inner)
        assert entry.everyone is not None
        everyone = entry.everyone(0)
        assert everyone.shape == (ids.numel(), 64)
        rows = torch.cat([x for x in tokens if x is not None])
        assert (rows[:, None] == everyone).all(-1).any(1).all(), "a token that is not in the batch"
    if family == "mixtral":
        weights = [points[0].weights(number) for number in range(4)]
        total = sum(float(w.sum()) for w in weights if w is not None)
        assert_close(total, float(ids.numel()), rtol=1e-5, atol=1e-5)


def test_padding_is_sent_to_no_observer() -> None:
    model, ids = expert_model("qwen3_moe", torch.float64), token_batches()[0]
    unstack(model)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    whole = routed(model, ids)
    with without_padding(mask):
        part = routed(model, ids)
    for all_tokens, real in zip(whole, part, strict=True):
        counts = [
            sum(len(x) for n in range(4) if (x := i.tokens(n)) is not None)
            for i in (all_tokens, real)
        ]
        assert counts[0] - counts[1] == 9 * 2
        assert real.everyone is not None
        assert len(real.everyone(1)) == ids.numel() - 9
        for number in range(4):
            x, weights = real.tokens(number), real.weights(number)
            assert x is None or weights is None or len(x) == len(weights)
