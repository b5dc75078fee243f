"""A module whose inputs no static scale serves: named, or served with dynamic scales."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationScheme
from families import assert_same_tensors, read, small_model
from interruption import Stop, small_steps, stop_at_mark
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.algorithms.as_stored import rounded_inputs
from steelyard.modifiers import GPTQModifier, QuantizationModifier, TransformModifier

NAME = "model.layers.0.mlp.down_proj"
HUGE = 5  # a token
STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}
RECIPE = {"config_groups": {"group_0": STATIC}, "ignore": ["lm_head"]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model in which one token has huge inputs of a `down_proj`."""
    model = small_model("llama", torch.float32)
    layer, embedding = model.model.layers[0], model.get_input_embeddings().weight.data
    embedding[:, 0] = 0
    embedding[HUGE] = 0
    embedding[HUGE, 0] = 1
    layer.self_attn.o_proj.weight.data[0] = 0
    for part in (layer.mlp.gate_proj, layer.mlp.up_proj):
        part.weight.data[:, 0] = 0
        part.weight.data[0, 0] = 20
    layer.mlp.down_proj.weight.data[:, 0] *= 1e-3
    path = tmp_path_factory.mktemp("huge")
    model.save_pretrained(path)
    return path


def samples() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(6, 128, (6, 32), generator=generator)
    rows[:, 0] = HUGE
    return rows.tolist()


def quantized(folder: Path, output: Path, modifier: Any = QuantizationModifier, **more: Any) -> Any:
    return oneshot(folder, modifier(**RECIPE), samples(), output, **more)


@torch.no_grad()
def distance(folder: Path, output: Path) -> float:
    """Return the relative error of the logits, as transformers computes them."""
    ids = torch.tensor(samples())
    ids[:, 1:] = ids[:, 1:].flip(0, 1)
    models = [AutoModelForCausalLM.from_pretrained(each) for each in (folder, output)]
    before, after = (model(ids).logits[:, 1:].double() for model in models)
    return float((after - before).norm() / before.norm())


@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_named_or_dynamic(modifier: Any, folder: Path, tmp_path: Path) -> None:
    noted = quantized(folder, tmp_path / "static", modifier)
    said = [note for note in noted.notes if "no static scale" in note]
    assert len(said) == 1 and said[0].startswith(f"{NAME}: ")
    assert 'uncalibratable="dynamic"' in said[0]
    mended = quantized(folder, tmp_path / "dynamic", modifier, uncalibratable="dynamic")
    assert any(note.startswith(f"{NAME}: no static scale") for note in mended.notes)
    static, dynamic = read(tmp_path / "static"), read(tmp_path / "dynamic")
    assert static.keys() - dynamic.keys() == {f"{NAME}.input_scale"}
    config = json.loads((tmp_path / "dynamic" / "config.json").read_text())["quantization_config"]
    own = config["config_groups"]["dynamic_0"]
    assert own["targets"] == [NAME]
    assert (own["input_activations"]["dynamic"], own["input_activations"]["strategy"]) == (
        True,
        "token",
    )
    assert "group_0" in config["config_groups"]
    assert distance(folder, tmp_path / "dynamic") < 0.5 * distance(folder, tmp_path / "static")


def test_a_transform_gives_dynamic_scales_where_a_static_one_costs_a_bit(
    folder: Path, tmp_path: Path
) -> None:
    """A factor that takes huge inputs down would make their column the largest of each row."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    model.get_submodule(NAME).weight.data[:, 0] *= 50
    model.save_pretrained(tmp_path / "m")
    recipe = [TransformModifier(n_grid=2), QuantizationModifier(**RECIPE)]
    outputs = [tmp_path / choice for choice in ("dynamic", "note")]
    found, _ = (
        oneshot(tmp_path / "m", recipe, samples(), each, uncalibratable=each.name)
        for each in outputs
    )
    measured = [note for note in found.notes if "times the squared error" in note]
    names = [note.partition(": ")[0] for note in measured]
    assert NAME in names and len(names) < 5
    scales = {f"{name}.input_scale" for name in names}
    assert read(outputs[1]).keys() - read(outputs[0]).keys() == scales
    dynamic, static = (distance(tmp_path / "m", each) for each in outputs)
    assert dynamic < 0.5 * static


@pytest.mark.parametrize("choice", ["note", "dynamic", "leave"])
def test_candidates_of_a_transform_are_rounded_as_served(choice: str) -> None:
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    x[0, 0] = 3000.0
    module: Any = torch.nn.Linear(32, 8)
    module.quantization_scheme = QuantizationScheme(**STATIC)
    rounding = rounded_inputs(module, x, choice)
    if choice == "leave":
        assert rounding is None
        return
    assert rounding is not None
    step = x.abs().amax(1, keepdim=True) / 127.5
    per_token = (x / step).round().clamp(-128, 127) * step
    if choice == "dynamic":
        assert_close(rounding(x), per_token)
    else:
        assert float((rounding(x)[1:]).abs().max()) == 0, "the huge value sets the range"


@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_left_unquantized(modifier: Any, folder: Path, tmp_path: Path) -> None:
    quantized(folder, tmp_path / "static", modifier)
    result = quantized(folder, tmp_path / "left", modifier, uncalibratable="leave")
    assert any(n.startswith(f"{NAME}: no static") and "not quantized" in n for n in result.notes)
    assert NAME not in result.modules and NAME not in {p.name for p in result.plan.quantized}
    assert [left.name for left in result.plan.left if "no static" in left.reason] == [NAME]
    left, source = read(tmp_path / "left"), read(folder)
    assert_close(left[f"{NAME}.weight"], source[f"{NAME}.weight"], rtol=0, atol=0)
    assert not [name for name in left if name.startswith(NAME) and name != f"{NAME}.weight"]
    config = json.loads((tmp_path / "left" / "config.json").read_text())["quantization_config"]
    assert NAME in config["ignore"]
    assert distance(folder, tmp_path / "left") < 0.5 * distance(folder, tmp_path / "static")


def test_a_resumed_run_leaves_the_same(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    quantized(folder, tmp_path / "whole", uncalibratable="leave")
    with small_steps():
        with monkeypatch.context() as patch:
            stop_at_mark(patch, 2)
            with pytest.raises(Stop):
                quantized(folder, tmp_path / "stopped", uncalibratable="leave")
        result = quantized(folder, tmp_path / "stopped", uncalibratable="leave")
    assert any("resumed after" in note for note in result.notes)
    assert_same_tensors(tmp_path / "whole", tmp_path / "stopped")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("whole", "stopped")]
    assert configs[0] == configs[1]


def test_statistics_of_a_file_decide_the_same(folder: Path, tmp_path: Path) -> None:
    quantized(folder, tmp_path / "data", uncalibratable="dynamic")
    oneshot(folder, QuantizationModifier(**RECIPE), samples(), save_statistics=tmp_path / "s")
    oneshot(
        folder,
        QuantizationModifier(**RECIPE),
        statistics=tmp_path / "s",
        output_dir=tmp_path / "file",
        uncalibratable="dynamic",
    )
    assert_same_tensors(tmp_path / "data", tmp_path / "file")


def test_partners_stay_together() -> None:
    from steelyard.engine.uncalibratable import _with_partners

    names = ["l.self_attn.q_proj", "l.self_attn.k_proj", "l.self_attn.o_proj"]
    experts = [f"l.mlp.experts.{i}.{p}" for i in (0, 1) for p in ("gate_proj", "down_proj")]
    modules = {name: torch.nn.Identity() for name in [*names, *experts]}
    assert _with_partners({names[0]: ""}, modules) == names[:2]
    assert _with_partners({experts[1]: ""}, modules) == experts
