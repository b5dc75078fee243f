"""Which outputs of a layer's modules reach other tokens, against changing them one by one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import other_model, small_model
from torch.nn import Linear, Module
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.engine.parts import Part
from steelyard.engine.token_paths import TokenPaths
from steelyard.model.placeholders import first_tensor
from steelyard.modifiers import GPTQModifier
from steelyard.observers.hessians import Hessians

IDS = torch.randint(3, 100, (2, 12), generator=torch.Generator().manual_seed(0))


class Sorting(torch.autograd.Function):
    """An operator without a gradient."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sort(1).values

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        raise RuntimeError("no gradient")


def layer_of(model: Module, layer: Module) -> Callable[[], Any]:
    """Return a call of the layer as the model makes it."""
    calls: list[Any] = []
    handle = layer.register_forward_pre_hook(
        lambda _m, args, kwargs: calls.append((args, kwargs)), with_kwargs=True
    )
    with torch.no_grad():
        model(IDS, use_cache=False)
    handle.remove()
    args, kwargs = calls[0]
    return lambda: layer(*args, **kwargs)


@torch.no_grad()
def stays(module: Module, forward: Callable[[], Any]) -> bool:
    """Change the output at one token after another; whether the others stay as they are."""
    before = first_tensor(forward())
    for token in range(IDS.shape[1]):

        def change(_m: Module, _a: Any, output: torch.Tensor, token: int = token) -> torch.Tensor:
            rows = output.reshape(*IDS.shape, -1).clone()
            rows[:, token] = rows[:, token].flip(-1) + 1
            return rows.reshape(output.shape)

        handle = module.register_forward_hook(change)
        after = first_tensor(forward())
        handle.remove()
        others = [i for i in range(IDS.shape[1]) if i != token]
        if not torch.allclose(before[:, others], after[:, others], rtol=0, atol=1e-9):
            return False
    return True


@pytest.mark.parametrize("family", ["llama", "qwen2_sliding", "gemma3", "opt", "mamba2"])
def test_as_changing_each_output_shows(family: str) -> None:
    model = other_model(family) if family == "mamba2" else small_model(family)
    model = model.double()
    base = model.model.decoder if family == "opt" else model.base_model
    layer = base.layers[1]
    forward = layer_of(model, layer)
    names = [n for n, m in layer.named_modules() if isinstance(m, Linear)]
    stages = [[f"layer.{name}"] for name in names]
    found = TokenPaths([]).stay(Part("layer", layer), stages, forward, None)
    expected = [stays(layer.get_submodule(name), forward) for name in names]
    assert found == expected
    assert any(expected) and not all(expected)


def test_a_stage_stays_if_all_of_its_modules_do() -> None:
    model = small_model("llama")
    layer = model.model.layers[0]
    stages = [["l.self_attn.v_proj", "l.mlp.up_proj"], ["l.mlp.gate_proj", "l.mlp.down_proj"]]
    paths = TokenPaths([])
    assert paths.stay(Part("l", layer), stages, layer_of(model, layer), None) == [False, True]


def test_experts_that_no_token_reaches_do_not_matter() -> None:
    model = small_model("llama")
    layer = model.model.layers[0]
    layer.mlp.idle = Linear(64, 64)
    stages = [["l.mlp.idle"], ["l.mlp.down_proj"]]
    paths = TokenPaths([])
    assert paths.stay(Part("l", layer), stages, layer_of(model, layer), None) == [False, True]
    assert not paths.notes


def test_an_operator_without_a_gradient_is_noted_once() -> None:
    model = small_model("llama")
    layer = model.model.layers[0]
    layer.post_attention_layernorm.register_forward_hook(lambda _m, _a, y: Sorting.apply(y))
    paths, call = TokenPaths([]), layer_of(model, layer)
    for name in ("l", "m"):
        assert paths.stay(Part(name, layer), [[f"{name}.self_attn.o_proj"]], call, None) is None
    assert len(paths.notes) == 1 and "every token counts alike" in paths.notes[0]


def test_what_gptq_is_solved_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hessians of the first layer: of the weighed inputs, but for q, k and v."""
    source = tmp_path / "m"
    model = small_model("llama", dtype=torch.float32)
    table = model.model.embed_tokens.weight.data
    table *= torch.linspace(0.8, 1.5, len(table))[:, None]  # so that tokens differ in size
    model.save_pretrained(source)
    ids = torch.randint(3, 100, (96, 12), generator=torch.Generator().manual_seed(1))
    seen: dict[str, Any] = {}
    whole = Hessians.hessian

    def keep(self: Hessians, name: str) -> torch.Tensor:
        found = whole(self, name)
        if ".0." in name:
            seen.setdefault(name, found.clone())
        return found

    monkeypatch.setattr(Hessians, "hessian", keep)
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    options = {"ignore": ["lm_head"], "drift_correction": False, "token_weights": True}
    modifier = GPTQModifier(config_groups=groups, **options)
    oneshot(source, modifier, list(ids.split(8)), tmp_path / "q")
    hidden = model.model.embed_tokens(ids).double()
    inverse = 1 / hidden.square().mean(-1)
    by_token = (inverse / inverse.mean(-1, keepdim=True)).flatten()
    inputs: dict[str, torch.Tensor] = {}

    def note(name: str, args: tuple[torch.Tensor, ...]) -> None:
        inputs[name] = args[0].flatten(0, 1).double()

    for name in ("self_attn.q_proj", "self_attn.o_proj"):
        module = model.model.layers[0].get_submodule(name)
        module.register_forward_pre_hook(lambda _m, args, name=name: note(name, args))
    with torch.no_grad():
        model(ids)
    x = inputs["self_attn.q_proj"]
    found = seen["model.layers.0.self_attn.q_proj"].double()
    assert_close(found, x.t() @ x, rtol=1e-4, atol=1e-4)
    x = inputs["self_attn.o_proj"]  # of q, k and v in 8 bits, so about
    found, plain = seen["model.layers.0.self_attn.o_proj"].double(), x.t() @ x
    weighed = x.t() @ (by_token[:, None] * x)
    assert (found - weighed).norm() < 0.1 * (plain - weighed).norm()
