"""Gradients layer by layer in reverse equal autograd through the whole model, in fp64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model
from torch.nn import Module, Parameter

from steelyard.distributed import ThreadPool
from steelyard.model.activations import HiddenStates, Room
from steelyard.model.layer_gradients import LayerGradients, Trace, Wanted, summed
from steelyard.model.layerwise import LayerwiseModel
from steelyard.model.opening import open_model

LENGTHS = (9, 12)


def rows() -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(3)
    return [torch.randint(3, 128, (1, length), generator=chance) for length in LENGTHS]


def weighed(logits: torch.Tensor, positions: slice) -> torch.Tensor:
    """Return a loss that depends on every logit in its own way."""
    factors = torch.sin(torch.arange(64 * 128, dtype=logits.dtype)).reshape(64, 128)
    return (logits.log_softmax(-1) * factors[positions]).sum()


def by_layers(folder: Path, pool: ThreadPool) -> tuple[float, dict[str, torch.Tensor]]:
    """Return loss and gradients of all floating-point parameters but the embedding."""
    source, _ = open_model(folder)
    names = {module: name for name, module in source.model.named_modules()}
    embedding = source.model.get_input_embeddings()

    @contextlib.contextmanager
    def every(root: Module, without: Sequence[Module]) -> Iterator[list[Wanted]]:
        excluded = {module for each in without for module in each.modules()}
        held: list[tuple[Module, str, Any]] = []
        wanted = []
        for module in root.modules():
            for leaf, parameter in module._parameters.items():
                if parameter is None or parameter.is_meta or module in excluded | {embedding}:
                    continue
                held.append((module, leaf, parameter))
                made = Parameter(parameter.data)
                wanted.append(Wanted(f"{names[module]}.{leaf}", made, torch.Tensor.double))
        for (module, leaf, _), each in zip(held, wanted, strict=True):
            module._parameters[leaf] = each.parameter
        yield wanted
        for module, leaf, parameter in held:
            module._parameters[leaf] = parameter

    model = LayerGradients(LayerwiseModel(source, "quantized"), pool, every)
    samples = [Trace({"input_ids": each}) for each in rows()]
    with pool, HiddenStates(Room(0, 1 << 30)) as held:
        model.forward(samples, held, True, lambda share: None)
        model.require_gradients(samples[0])
        with model.head() as wanted:
            calls = [partial(model.through_head, each, wanted, weighed, 5) for each in samples]
            ends = pool.do(enumerate(calls))
        found: dict[str, torch.Tensor] = {}
        for _, _, gradients in ends:
            summed(found, gradients)
        summed(found, model.backward(samples, [seed for _, seed, _ in ends], lambda share: None))
    return sum(loss for loss, _, _ in ends), found


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen2", "opt", "qwen3_moe"])
def test_gradients_equal_autograd_through_the_whole_model(family: str, tmp_path: Path) -> None:
    model = small_model(family, torch.float32, tie_word_embeddings=False).eval()
    model.save_pretrained(tmp_path)
    loss, found = by_layers(tmp_path, ThreadPool(1))
    if family == "qwen3_moe":
        model.set_experts_implementation("eager")  # the only one in fp64
    exact = model.double().requires_grad_(True)
    total = torch.zeros((), dtype=torch.float64)
    for each in rows():
        logits = exact(each, use_cache=False).logits
        total = total + weighed(logits[0], slice(0, each.shape[1]))
    total.backward()
    assert loss == pytest.approx(float(total.detach()), rel=1e-4)
    left = ("embed_tokens.", "embed_positions.", ".experts.")  # experts have other names here
    wanted = {
        name: parameter.grad
        for name, parameter in exact.named_parameters()
        if parameter.grad is not None and not any(part in name for part in left)
    }
    assert wanted.keys() <= found.keys() and len(wanted) > 10
    largest = max(float(gradient.abs().max()) for gradient in wanted.values())
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5 * largest, msg=name)


def test_threads_do_not_change_a_bit(tmp_path: Path) -> None:
    small_model("llama", torch.float32).save_pretrained(tmp_path)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        loss, alone = by_layers(tmp_path, ThreadPool(1))
        torch.set_num_threads(2)
        also, both = by_layers(tmp_path, ThreadPool(2))
    finally:
        torch.set_num_threads(before)
    assert loss == also and alone.keys() == both.keys()
    assert all(torch.equal(alone[name], both[name]) for name in alone)
