"""Layers that a model calls more than once are found without data, weights and traces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, other_model, read, small_model, token_batches
from multimodal import multimodal_model
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.errors import PlanError
from steelyard.model.repeated_calls import repeated_layer
from steelyard.model.source import Source
from steelyard.model.stacks import decoder_layers, model_layers
from steelyard.modifiers import QuantizationModifier


class Twice(torch.nn.ModuleList):
    """Layers that each run twice."""

    def __iter__(self) -> Any:
        yield from (layer for layer in super().__iter__() for _ in range(2))

    def __getitem__(self, index: Any) -> Any:
        return self if isinstance(index, slice) else super().__getitem__(index)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_that_run_once_and_twice(family: str) -> None:
    model = small_model(family)
    assert repeated_layer(model, model_layers(model)) is None
    name, layers = decoder_layers(model)
    found = model_layers(model)
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, Twice(layers))
    assert repeated_layer(model, found) == f"{name}.0"


def test_the_skeleton_of_a_folder_is_enough(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path)
    model = Source.open(tmp_path).model
    layers = model_layers(model)
    assert repeated_layer(model, layers) is None
    model.model.layers = Twice(model.model.layers)
    assert repeated_layer(model, layers) == "model.layers.0"
    assert all(p.device.type == "meta" for p in model.parameters())


@pytest.mark.parametrize("family", ["qwen2_vl", "whisper", "t5"])
def test_nothing_is_left_behind(family: str) -> None:
    """Also where the forward notes tensors in modules, or needs other inputs than token ids."""
    model = multimodal_model(family)
    before = [{**m.__dict__, **m._buffers, **m._parameters} for m in model.modules()]
    assert repeated_layer(model, model_layers(model)) is None
    after = [{**m.__dict__, **m._buffers, **m._parameters} for m in model.modules()]
    assert [list(state) for state in after] == [list(state) for state in before]
    for old, new in zip(before, after, strict=True):
        assert all(new[key] is old[key] for key in old)
    assert not any(isinstance(value, FakeTensor) for state in after for value in state.values())


def test_the_plan_runs_a_looping_model_as_a_whole(tmp_path: Path) -> None:
    model = other_model("hrm_text")
    recipe = QuantizationModifier(
        scheme="FP8", activation_observer="static_minmax", ignore=["lm_head"]
    )
    data = [each[0] for each in token_batches()]
    why = "HrmTextForCausalLM calls model.L_module.layers.0 more than once"
    with pytest.raises(PlanError, match=f"{why}.*basic"):
        oneshot(model, recipe, data, tmp_path / "q", pipeline="sequential")
    assert not (tmp_path / "q").exists()
    plan = oneshot(model, recipe, data, tmp_path / "q", dry_run=True, show_progress=False).plan
    assert plan.whole
    assert f"as a whole, with all of it in memory: {why}" in plan.route
    seen: list[torch.Tensor] = []
    linear = model.model.L_module.layers[0].mlp.down_proj
    hook = linear.register_forward_pre_hook(lambda _m, args: seen.append(args[0].abs().amax()))
    with torch.no_grad():
        for each in token_batches():
            model.float()(each)
    hook.remove()
    assert len(seen) > len(data), "it runs more than once for each batch"
    oneshot(model.bfloat16(), recipe, data, tmp_path / "q", show_progress=False)
    scale = read(tmp_path / "q")["model.L_module.layers.0.mlp.down_proj.input_scale"]
    assert_close(float(scale), float(max(seen)) / 448, rtol=2**-8, atol=0)  # stored in bf16


def test_weights_that_files_hold_within_others_are_refused_in_the_plan(tmp_path: Path) -> None:
    other_model("hrm_text").save_pretrained(tmp_path / "m")  # one tensor for gate, q, k and v
    recipe = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
    data = [each[0] for each in token_batches()]
    with pytest.raises(PlanError, match=r"q_proj: no tensor in .* is the weight alone.*module"):
        oneshot(tmp_path / "m", recipe, data, tmp_path / "q")
