"""Images, audio, encoders and hybrids through `oneshot`: from a folder and from a loaded module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import assert_same_tensors, read
from interruption import Stop, lasting, small_steps, stop_at_mark
from multimodal import multimodal_model, samples_for_model
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.engine.identity import digest_of
from steelyard.errors import CalibrationError, DataError
from steelyard.modifiers import GPTQModifier, QuantizationModifier

GROUPS: Any = {
    "group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "strategy": "group", "group_size": 16},
    }
}
RECIPES: dict[str, Any] = {
    "FP8": QuantizationModifier(scheme="FP8", ignore=["lm_head"]),
    "GPTQ": GPTQModifier(config_groups=GROUPS, ignore=["lm_head"]),
}
FAMILIES = [
    ("llava", "FP8"),
    ("llava", "GPTQ"),
    ("qwen3_vl", "GPTQ"),
    ("mllama", "FP8"),
    ("whisper", "FP8"),
    ("whisper", "GPTQ"),
    ("t5", "FP8"),
    ("nemotron_h", "GPTQ"),
]


def run(model: Any, recipe: Any, data: Any, output: Path | None = None, **options: Any) -> Any:
    return oneshot(model, recipe, data, output, show_progress=False, **options)


@pytest.mark.parametrize(("family", "kind"), FAMILIES)
def test_a_folder_and_a_module_give_one_checkpoint_that_transformers_loads(
    family: str, kind: str, tmp_path: Path
) -> None:
    made, data = multimodal_model(family), samples_for_model(family, 4)
    made.save_pretrained(tmp_path / "m")
    result = run(tmp_path / "m", RECIPES[kind], data, tmp_path / "folder")
    assert result.plan.route.startswith("one layer at a time: ")
    assert all(module.tokens for module in result.modules.values())
    loaded = type(made).from_pretrained(tmp_path / "m", dtype=torch.bfloat16)
    run(loaded, RECIPES[kind], data, tmp_path / "module")
    assert_same_tensors(tmp_path / "folder", tmp_path / "module")
    configs = [json.loads((tmp_path / n / "config.json").read_text()) for n in ("folder", "module")]
    assert configs[0]["quantization_config"] == configs[1]["quantization_config"]
    stored = {name.rpartition(".")[0] for name in read(tmp_path / "m")}
    assert {name.rpartition(".")[0] for name in read(tmp_path / "folder")} <= stored
    served = type(made).from_pretrained(tmp_path / "folder", dtype=torch.bfloat16)
    with torch.no_grad():
        for sample in data:
            floats = {k: v.bfloat16() if v.is_floating_point() else v for k, v in sample.items()}
            expected = loaded(**floats).logits.float()
            error = (served(**floats).logits.float() - expected).norm() / expected.norm()
            assert error < 0.02, "beyond the rounding of bf16"


def test_the_decoder_is_calibrated_on_what_the_tower_gives(tmp_path: Path) -> None:
    model, data = multimodal_model("llava", torch.float32), samples_for_model("llava")
    seen: list[float] = []
    name = "model.language_model.layers.0.self_attn.q_proj"
    handle = model.get_submodule(name).register_forward_pre_hook(
        lambda _m, args: seen.append(float(args[0].abs().max()))
    )
    with torch.no_grad():
        for sample in data:
            model(**sample)
    handle.remove()
    ignore = ["lm_head", "re:.*vision_tower.*", "re:.*multi_modal_projector.*"]
    recipe = QuantizationModifier(scheme="FP8", activation_observer="static_minmax", ignore=ignore)
    run(model, recipe, data)
    scale = model.get_submodule(name).input_scale
    assert_close(float(scale), max(seen) / 448, rtol=1e-5, atol=0)
    tower = [n for n, m in model.named_modules() if "vision" in n and hasattr(m, "input_scale")]
    assert tower == []


@pytest.mark.parametrize("marks", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", RECIPES)
def test_a_run_with_images_resumes_between_any_two_layers(
    kind: str, marks: int, tmp_path: Path
) -> None:
    """Also between layers of the tower, whose outputs the decoder adds between its own."""
    multimodal_model("qwen3_vl").save_pretrained(tmp_path / "m")
    data = samples_for_model("qwen3_vl")
    with small_steps():
        run(tmp_path / "m", RECIPES[kind], data, tmp_path / "whole")
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Stop):
            stop_at_mark(patch, marks)
            run(tmp_path / "m", RECIPES[kind], data, tmp_path / "killed")
        result = run(tmp_path / "m", RECIPES[kind], data, tmp_path / "killed")
    assert any(note.startswith("resumed after") for note in result.notes)
    for file in (tmp_path / "whole").iterdir():
        assert lasting(tmp_path / "killed" / file.name) == lasting(file)


def test_other_pixels_are_other_data() -> None:
    samples = samples_for_model("llava")
    others = [{**s, "pixel_values": s["pixel_values"] + 1} for s in samples]
    assert digest_of(samples) != digest_of(others)
    assert digest_of(samples) == digest_of(samples_for_model("llava"))


def test_padding_takes_no_part_in_statistics() -> None:
    """Two samples in each padded batch, or one."""
    data = samples_for_model("llava", 4)
    length = max(sample["input_ids"].shape[1] for sample in data)

    def padded(rows: list[Any]) -> dict[str, torch.Tensor]:
        together: dict[str, list[torch.Tensor]] = {}
        for row in rows:
            missing = length - row["input_ids"].shape[1]
            for name in ("input_ids", "attention_mask"):
                more = torch.nn.functional.pad(row[name], (missing, 0))
                together.setdefault(name, []).append(more)
            together.setdefault("pixel_values", []).append(row["pixel_values"])
        return {name: torch.cat(values) for name, values in together.items()}

    results = []
    for options in ({}, {"data_collator": padded, "batch_size": 2}):
        model = multimodal_model("llava", torch.float32)
        result = run(model, RECIPES["FP8"], data, shuffle_calibration_samples=False, **options)
        name = "model.language_model.layers.1.mlp.down_proj"
        results.append((result.modules[name].tokens, model.get_submodule(name).input_scale))
    assert results[0][0] == results[1][0] == sum(s["input_ids"].numel() for s in data)
    assert_close(results[0][1], results[1][1], rtol=1e-4, atol=0)


def test_a_tensor_that_the_model_does_not_take_is_an_error() -> None:
    data = [
        {**sample, "pixel_vales": sample["pixel_values"]} for sample in samples_for_model("llava")
    ]
    with pytest.raises(DataError, match=r"pixel_vales .* did you mean 'pixel_values'"):
        run(multimodal_model("llava"), RECIPES["FP8"], data)


def test_a_tower_that_no_image_reaches_is_named() -> None:
    data = [{"input_ids": torch.arange(3, 60)[None]}]
    with pytest.raises(CalibrationError, match="vision_tower"):
        run(multimodal_model("llava"), RECIPES["FP8"], data)


def test_the_plan_says_how_the_model_runs(tmp_path: Path) -> None:
    model, data = multimodal_model("mllama"), samples_for_model("mllama")
    plan = run(model, RECIPES["FP8"], data, dry_run=True).plan
    assert plan.route == (
        "one layer at a time: model.vision_model.transformer.layers.{0-1} (2 layers), then "
        "model.vision_model.global_transformer.layers.0 (1 layer), then "
        "model.language_model.layers.{0-2} (3 layers)"
    )
    assert plan.route in str(plan)
    layers = model.model.language_model.layers
    layers[1].mlp = layers[0].mlp
    plan = run(model, RECIPES["FP8"], data, dry_run=True).plan
    assert plan.whole and "share a module" in plan.route
