"""Rotations that a server applies: R4 of SpinQuant, and QuIP.

The oracle is compressed-tensors: its own transforms, attached to the checkpoint as transformers
loads it. transformers does not attach them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformConfig, TransformFactory
from families import assert_same_tensors, read, small_model, token_batches
from interruption import Stop, small_steps, stop_at_mark
from steelyard.modifiers.transform.quip import QuIPModifier
from steelyard.modifiers.transform.spinquant import SpinQuantModifier
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.cli.app import run as steelyard
from steelyard.errors import CheckpointError, PlanError, RecipeError
from steelyard.evaluate import evaluate
from steelyard.model.served_hooks import attach_rotations, made_rotation
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.recipes import load_recipe

TOKENS = torch.randint(3, 128, (2, 12), generator=torch.Generator().manual_seed(3))
WEIGHTS = {
    "num_bits": 8,
    "strategy": "group",
    "group_size": 16,
    "observer": "memoryless_minmax",
}
GROUPS = {"all": {"targets": ["Linear"], "weights": WEIGHTS}}
STATIC = {
    "all": {
        "targets": ["Linear"],
        "weights": {**WEIGHTS, "strategy": "channel", "group_size": None},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "observer": "minmax"},
    }
}
ROUNDED = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama with a few large channels, whose MLP is 96 = 3 * 32 wide."""
    folder = tmp_path_factory.mktemp("served") / "m"
    made = small_model("llama", torch.float32, num_hidden_layers=2, intermediate_size=96)
    for layer in made.model.layers:
        layer.mlp.up_proj.weight.data[5] *= 30
    made.save_pretrained(folder)
    return folder


def samples() -> list[torch.Tensor]:
    return [row.unsqueeze(0) for row in token_batches()[0]]


@torch.no_grad()
def logits(folder: Path, served: bool = True) -> torch.Tensor:
    """Return the logits of a checkpoint, with the transforms of its config if it has some."""
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    content = json.loads((folder / "config.json").read_text())
    config = (content.get("quantization_config") or {}).get("transform_config")
    if config and served:
        stored = read(folder)
        for group, scheme in TransformConfig.model_validate(config).config_groups.items():
            scheme.apply = [each for each in scheme.apply if each.is_online()]
            factory = TransformFactory.from_scheme(scheme, name=group)
            factory.apply_to_model(loaded, use_tqdm=False)
            found = [name for name in stored if f".{group}_" in name]
            parameters = dict(loaded.named_parameters(remove_duplicate=False))
            for name in found:
                parameters[name].data.copy_(stored[name])
            assert found
    return loaded(TOKENS, use_cache=False).logits


def distance(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm())


RECIPES: dict[str, list[Any]] = {
    "R4": [SpinQuantModifier(rotations=["R4"], transform_type="random-hadamard"), ROUNDED],
    "all": [SpinQuantModifier(rotations=["R1", "R2", "R4"], transform_block_size=32), ROUNDED],
    "quip": [QuIPModifier(rotations=["v", "u"]), ROUNDED],
    "blocks": [QuIPModifier(transform_type="hadamard", transform_block_size=16), ROUNDED],
}


@pytest.mark.parametrize("kind", RECIPES)
def test_compressed_tensors_computes_the_same(kind: str, model: Path, tmp_path: Path) -> None:
    result = oneshot(model, RECIPES[kind], output_dir=tmp_path / "q")
    expected = logits(model)
    near, far = (distance(logits(tmp_path / "q", served), expected) for served in (True, False))
    assert near < 0.04 and far > 2 * near
    assert any("without tensor parallelism" in warning for warning in result.warnings)
    assert steelyard(["validate", str(tmp_path / "q"), "--source", str(model)]) == 0
    stored = [tensor for name, tensor in read(tmp_path / "q").items() if "put.weight" in name]
    assert stored and all(torch.equal(each.abs(), torch.ones_like(each)) for each in stored)
    found = evaluate(model, tmp_path / "q", samples())
    assert found.kl_divergence < 1e-4


@pytest.mark.parametrize("last", [QuantizationModifier, GPTQModifier])
def test_calibration_sees_rotated_inputs(last: Any, model: Path, tmp_path: Path) -> None:
    """A folder and a module alike; the outlier no longer sets the scale of down_proj's input."""
    quantizing = last(config_groups=STATIC, ignore=["lm_head"])
    rotation = SpinQuantModifier(
        rotations=["R4"], transform_type="random-hadamard", held_out_check=False
    )
    options: dict[str, Any] = {"shuffle_calibration_samples": False}
    oneshot(model, [quantizing], samples(), tmp_path / "plain", **options)
    oneshot(model, [rotation, quantizing], samples(), tmp_path / "q", **options)
    loaded = AutoModelForCausalLM.from_pretrained(model)
    oneshot(loaded, [rotation, quantizing], samples(), **options)
    with pytest.raises(CheckpointError, match="cannot store rotation R4"):
        loaded.save_pretrained(tmp_path / "dense", save_compressed=False)
    loaded.save_pretrained(tmp_path / "again")
    assert_same_tensors(tmp_path / "q", tmp_path / "again")
    key = "model.layers.0.mlp.down_proj.input_scale"
    assert float(read(tmp_path / "q")[key]) < 0.5 * float(read(tmp_path / "plain")[key])
    expected = logits(model)
    rotated, plain = (distance(logits(tmp_path / n), expected) for n in ("q", "plain"))
    assert rotated < plain


def test_modules_share_a_rotated_input_whatever_runs_between_them() -> None:
    """As in GPTQ, which solves q, k and v of all batches before any batch goes on."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(16, 16) for name in "qk"})
    (rotation,) = QuIPModifier(rotations=["v"], transform_block_size=16).served_rotations()
    attach_rotations(model, rotation, made_rotation)
    seen: dict[str, list[torch.Tensor]] = {"q": [], "k": []}
    for name, module in model.items():
        module.register_forward_pre_hook(lambda _, args, name=name: seen[name].append(args[0]))
    batches = [torch.randn(2, 16), torch.randn(2, 16)]
    for module in model.values():
        for x in batches:
            module(x)
    for one, other, x in zip(seen["q"], seen["k"], batches, strict=True):
        assert one is other
        torch.testing.assert_close(one, made_rotation(rotation, 16).rotate(x).to(x.dtype))


def test_gptq_of_several_batches_after_quip(model: Path, tmp_path: Path) -> None:
    """The weights, rotated back, are those of the model within rounding."""
    quip = QuIPModifier(rotations=["v"])
    gptq = GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])
    result = oneshot(model, [quip, gptq], samples(), tmp_path / "q")
    assert len(result.modules) == 14
    assert evaluate(model, tmp_path / "q", samples()).kl_divergence < 1e-3


def test_a_stopped_run_resumes_to_the_same_bytes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = [RECIPES["R4"][0], GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])]
    options: dict[str, Any] = {"shuffle_calibration_samples": False}
    with small_steps():
        oneshot(model, recipe, samples(), tmp_path / "whole", **options)
        with monkeypatch.context() as patch:
            stop_at_mark(patch, 1)
            with pytest.raises(Stop):
                oneshot(model, recipe, samples(), tmp_path / "stopped", **options)
        oneshot(model, recipe, samples(), tmp_path / "stopped", **options)
    assert_same_tensors(tmp_path / "whole", tmp_path / "stopped")


# -- what vLLM does not serve -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes", "modifier", "reason"),
    [
        (
            "llama",
            {"mlp_bias": True},
            {"rotations": ["R4"]},
            r"R4: .*down_proj has a bias",
        ),
        ("qwen3_moe", {}, {"rotations": ["R4"]}, r"rotation R4: .*down_proj.* are experts"),
        ("llama", {"intermediate_size": 96}, {"rotations": ["R4"]}, r"96 .* no power of two.* 32"),
        ("phi3", {}, {"rotations": ["r4"], "transform_type": "random-matrix"}, "scale a random-ma"),
        ("gpt2", {}, {"rotations": ["R4"]}, "no Linear of the model matches"),
        ("llama", {}, {"ignore": []}, "vLLM rotates no input of lm_head"),
        ("llama", {}, {"targets": ["re:.*q_proj$"]}, r"q_proj but not .*k_proj, and vLLM fuses"),
        ("llama", {}, {"transform_block_size": 48}, "48 does not divide the 64"),
    ],
)
def test_plans_that_are_refused(
    family: str, changes: dict[str, Any], modifier: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    kind: Any = SpinQuantModifier if "rotations" in modifier else QuIPModifier
    source = small_model(family, num_hidden_layers=1, **changes) if family != "gpt2" else None
    made = source if source is not None else small_model(family)
    made.save_pretrained(tmp_path / "m")
    with pytest.raises(PlanError, match=reason):
        oneshot(tmp_path / "m", [kind(**modifier), ROUNDED], output_dir=tmp_path / "q")


def test_recipes_of_llm_compressor() -> None:
    written = """
    default_stage:
      default_modifiers:
        QuIPModifier:
          rotations: [v]
          transform_type: random-hadamard
          transform_config:
            config_groups:
              v:
                type: hadamard
                head_dim: 64
                apply:
                  - {targets: [Linear], location: input, ignore: [lm_head]}
                  - {targets: [Linear], location: weight_input, inverse: true, ignore: [lm_head]}
    """
    found = load_recipe(written).modifiers[0]
    assert found == QuIPModifier(transform_type="hadamard", transform_block_size=64)
    for options in ({"randomize": True}, {"learnable": True}, {"rotations": ["w"]}):
        with pytest.raises(RecipeError):
            QuIPModifier(**options)
