"""From a model to a checkpoint that transformers loads, for every scheme."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from families import read, small_model, token_batches
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.errors import CalibrationError, CheckpointError, DataError, PlanError
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier
from steelyard.recipes import load_recipe

FP8 = torch.float8_e4m3fn


def group(name: str, **activation: Any) -> dict[str, Any]:
    """A scheme of explicit config groups: 8-bit channel weights and static activations."""
    return {
        "config_groups": {
            name: {
                "targets": ["Linear"],
                "weights": {"num_bits": 8, "strategy": "channel"},
                "input_activations": {"num_bits": 8, "strategy": "tensor", **activation},
            }
        }
    }


def rtn(scheme: str, **options: Any) -> QuantizationModifier:
    return QuantizationModifier(scheme=scheme, ignore=["lm_head"], **options)


def weights(**args: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {"targets": ["Linear"], "weights": args}}}


KV = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "static_minmax"}
SCHEMES: dict[str, dict[str, Any]] = {
    **{name: {"scheme": name} for name in PRESET_SCHEMES if name not in ("UNQUANTIZED", "INT8")},
    "W4A16 group 32": weights(num_bits=4, strategy="group", group_size=32),
    "W4A16 group 64 asymmetric": weights(
        num_bits=4, strategy="group", group_size=64, symmetric=False
    ),
    "W4A16 channel": weights(num_bits=4, strategy="channel"),
    "W8A8 static": group("group_0"),
    "W8A8 static asymmetric": group("group_0", symmetric=False),
    "FP8 KV cache": {"scheme": "FP8_DYNAMIC", "kv_cache_scheme": KV},
    "KV cache alone": {"kv_cache_scheme": KV},
    "W4A16 optimal": {"scheme": "W4A16", "weight_observer": "optimal"},
    "W4A16 negative": {
        "scheme": "W4A16",
        "weight_observer": {"name": "optimal", "negative_scales": True},
    },
}


def model_256(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    return small_model("llama", dtype, **{**sizes, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("source")
    model_256().save_pretrained(path, max_shard_size="400KB")
    (path / "notes.txt").write_text("kept")
    return path


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(token_batches(seed=9)[0]).logits


@pytest.mark.parametrize("scheme", SCHEMES)
def test_loaded_checkpoint_equals_the_fake_quantized_model(
    scheme: str, folder: Path, tmp_path: Path
) -> None:
    modifier = QuantizationModifier(ignore=["lm_head"], **SCHEMES[scheme])
    data = token_batches() if load_recipe(modifier).needs_data else None
    oneshot(folder, modifier, data, tmp_path / "from_folder")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    plain = logits(model)
    oneshot(model, modifier, data, tmp_path / "from_module")
    first, second = (read(tmp_path / n) for n in ("from_folder", "from_module"))
    assert_close(first, second, rtol=0, atol=0, msg="layer by layer differs from in memory")
    ours = logits(model)
    assert not torch.equal(ours, plain), "nothing was quantized"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "from_folder", dtype=torch.bfloat16)
    assert_close(logits(loaded), ours, rtol=0, atol=0)


def test_files_are_carried_over_and_the_source_is_untouched(folder: Path, tmp_path: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    result = oneshot(folder, rtn("W4A16"), None, tmp_path / "q")
    assert result.output_dir == tmp_path / "q"
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert (tmp_path / "q" / "notes.txt").read_text() == "kept"
    assert "W4A16" in (tmp_path / "q" / "recipe.yaml").read_text()
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    source, written = read(folder), read(tmp_path / "q")
    kept = [name for name in source if name in written]
    assert "lm_head.weight" in kept
    assert "model.layers.0.mlp.up_proj.weight" not in kept
    assert_close({n: written[n] for n in kept}, {n: source[n] for n in kept}, rtol=0, atol=0)


def test_reported_error_is_that_of_the_stored_weight(folder: Path, tmp_path: Path) -> None:
    result = oneshot(folder, rtn("W8A8"), None, tmp_path / "q")
    name = "model.layers.1.mlp.down_proj"
    source, written = read(folder), read(tmp_path / "q")
    weight = source[f"{name}.weight"].float()
    stored = written[f"{name}.weight"].float() * written[f"{name}.weight_scale"].float()
    error = float((stored - weight).square().sum() / weight.square().sum())
    assert result.modules[name].error == pytest.approx(error, rel=1e-2)
    assert len(result.modules) == 14


def test_importance_of_the_data_weighs_the_columns(folder: Path, tmp_path: Path) -> None:
    """The weight error is larger, but less where E[x^2] is large: the search minimised that."""
    modifier, data = rtn("W4A16", weight_observer="optimal"), token_batches()
    plain = oneshot(folder, modifier, None, tmp_path / "plain")
    weighed = oneshot(folder, [IMatrixGatherer(), modifier], data, tmp_path / "weighed")
    assert sum(m.tokens for m in plain.modules.values()) == 0
    name = "model.layers.0.mlp.down_proj"
    assert weighed.modules[name].error > plain.modules[name].error
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    seen: list[torch.Tensor] = []
    layer = model.get_submodule(name)
    layer.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, -2)))
    with torch.no_grad():
        for batch in data:
            model(batch)
    importance = torch.cat(seen).square().mean(0)

    def error(folder: Path) -> float:
        written = read(folder)
        words = written[f"{name}.weight_packed"].long().unsqueeze(-1)
        codes = ((words >> torch.arange(0, 32, 4)) & 15).flatten(1) - 8
        stored = codes * written[f"{name}.weight_scale"].float().repeat_interleave(128, dim=1)
        return float((importance * (stored - layer.weight.detach()).square()).sum())

    assert error(tmp_path / "weighed") < error(tmp_path / "plain")


def test_importance_is_gathered_only_where_asked(folder: Path, tmp_path: Path) -> None:
    modifier, data = rtn("W4A16", weight_observer="optimal"), token_batches()
    gatherer = IMatrixGatherer(targets=["re:.*layers.0.*"], ignore=["re:.*up_proj"])
    oneshot(folder, modifier, None, tmp_path / "plain")
    oneshot(folder, [gatherer, modifier], data, tmp_path / "some")
    plain, some = (read(tmp_path / n) for n in ("plain", "some"))
    weighed = {n for n in plain if not torch.equal(plain[n], some[n])}
    assert any("layers.0.mlp.down_proj" in name for name in weighed)
    assert not any("layers.1" in name or "up_proj" in name for name in weighed)


def test_static_scheme_without_data_is_refused_at_once(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="pass dataset="):
        oneshot(folder, QuantizationModifier(scheme="FP8"), None, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []


def test_a_dataset_that_is_not_needed_is_said_to_be(folder: Path, tmp_path: Path) -> None:
    with pytest.warns(UserWarning, match="needs no calibration data"):
        result = oneshot(
            folder,
            rtn("FP8_DYNAMIC"),
            token_batches(),
            tmp_path / "q",
        )
    assert any("needs no calibration data" in note for note in result.notes)


def test_existing_output_is_refused(folder: Path, tmp_path: Path) -> None:
    modifier = rtn("FP8_DYNAMIC")
    (tmp_path / "q").mkdir()
    (tmp_path / "q" / "precious.txt").write_text("mine")
    for overwrite in (False, True):
        with pytest.raises(CheckpointError, match=r"holds precious\.txt, not part"):
            oneshot(folder, modifier, None, tmp_path / "q", overwrite=overwrite)
    assert (tmp_path / "q" / "precious.txt").read_text() == "mine"
    oneshot(folder, modifier, None, tmp_path / "old")
    (tmp_path / "old" / "NOTICE").write_text("old")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        oneshot(folder, modifier, None, tmp_path / "old")
    oneshot(folder, modifier, None, tmp_path / "old", overwrite=True)
    assert not (tmp_path / "old" / "NOTICE").exists()


def test_plan_errors_stop_the_run(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="matches no module"):
        oneshot(
            folder, QuantizationModifier(scheme="W4A16", targets=["Liner"]), None, tmp_path / "q"
        )
    assert list(tmp_path.iterdir()) == []


def test_dry_run_only_plans(folder: Path, tmp_path: Path) -> None:
    modifier = rtn("FP8")
    result = oneshot(folder, modifier, output_dir=tmp_path / "q", dry_run=True)
    assert len(result.plan.quantized) == 14
    assert list(tmp_path.iterdir()) == []


def test_output_size_is_known_beforehand(folder: Path, tmp_path: Path) -> None:
    for scheme in ("W4A16", "FP8_DYNAMIC", "NVFP4A16"):
        result = oneshot(folder, rtn(scheme), None, tmp_path / scheme)
        sizes = [t.numel() * t.element_size() for t in read(tmp_path / scheme).values()]
        assert result.plan.output_bytes == sum(sizes)


def test_quantized_source_is_refused(folder: Path, tmp_path: Path) -> None:
    modifier = rtn("FP8_DYNAMIC")
    oneshot(folder, modifier, None, tmp_path / "q")
    with pytest.raises(CheckpointError, match="quantized already"):
        oneshot(tmp_path / "q", modifier, None, tmp_path / "again")


def test_whole_model_pass_agrees_with_layer_by_layer(folder: Path, tmp_path: Path) -> None:
    modifier = QuantizationModifier(ignore=["lm_head"], **group("group_0"))
    oneshot(folder, modifier, token_batches(), tmp_path / "layers")
    oneshot(folder, modifier, token_batches(), tmp_path / "whole", pipeline="basic")
    assert_close(read(tmp_path / "layers"), read(tmp_path / "whole"), rtol=0, atol=0)


def test_output_projection_can_be_calibrated_too(folder: Path, tmp_path: Path) -> None:
    oneshot(folder, QuantizationModifier(**group("group_0")), token_batches(), tmp_path / "q")
    written = read(tmp_path / "q")
    assert float(written["lm_head.input_scale"]) > 0
    assert written["lm_head.weight"].dtype == torch.int8


class Experts(torch.nn.Module):
    """Two experts behind a router that only ever takes the first."""

    def __init__(self, mlp: Any) -> None:
        super().__init__()
        import copy

        self.taken, self.passed_over = mlp, copy.deepcopy(mlp)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.taken(hidden)


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_modules_without_tokens_are_all_named(pipeline: str, tmp_path: Path) -> None:
    model = model_256()
    for layer in model.model.layers:
        layer.mlp = Experts(layer.mlp)
    modifier = QuantizationModifier(ignore=["lm_head"], **group("group_0"))
    with pytest.raises(CalibrationError) as caught:
        oneshot(model, modifier, token_batches(), tmp_path / "q", pipeline=pipeline)
    for index in range(2):
        for part in ("gate_proj", "up_proj", "down_proj"):
            assert f"model.layers.{index}.mlp.passed_over.{part}" in str(caught.value)
    assert "taken" not in str(caught.value)
    assert "weights-only" in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_modules_without_tokens_can_keep_their_activations(tmp_path: Path) -> None:
    model = model_256()
    model.model.layers[1].mlp = Experts(model.model.layers[1].mlp)
    modifier = QuantizationModifier(ignore=["lm_head"], **group("group_0"))
    result = oneshot(model, modifier, token_batches(), tmp_path / "q", uncalibrated="weights-only")
    written = read(tmp_path / "q")
    assert "model.layers.1.mlp.passed_over.up_proj.weight_scale" in written
    assert "model.layers.1.mlp.passed_over.up_proj.input_scale" not in written
    assert "model.layers.1.mlp.taken.up_proj.input_scale" in written
    assert any("passed_over.up_proj" in note for note in result.notes)
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    named = config["config_groups"]["weights_only_0"]
    assert "model.layers.1.mlp.passed_over.up_proj" in named["targets"]
    assert named["input_activations"] is None


def test_an_error_half_way_leaves_no_output(folder: Path, tmp_path: Path) -> None:
    model = model_256()
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] = float("nan")
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.up_proj"):
        oneshot(model, rtn("W4A16"), None, tmp_path / "q")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["pipeline", "uncalibrated"])
def test_mistyped_choices_are_named(name: str, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=name):
        oneshot(
            folder,
            QuantizationModifier(scheme="W4A16"),
            None,
            tmp_path / "q",
            **{name: "sequental"},
        )


def test_save_pretrained_of_a_quantized_module_writes_the_checkpoint(
    folder: Path, tmp_path: Path
) -> None:
    """As scripts do it that give no output folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    result = oneshot(model, rtn("W4A16"))
    assert result.output_dir is None
    model.save_pretrained(tmp_path / "q", save_compressed=True)
    oneshot(folder, rtn("W4A16"), None, tmp_path / "direct")
    assert_close(read(tmp_path / "q"), read(tmp_path / "direct"), rtol=0, atol=0)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    assert_close(logits(loaded), logits(model), rtol=0, atol=0)


def test_propagated_error_reaches_the_layers_behind(folder: Path, tmp_path: Path) -> None:
    modifier = rtn("W2A16" if "W2A16" in PRESET_SCHEMES else "W4A16", weight_observer="optimal")
    recipe = [IMatrixGatherer(), modifier]
    oneshot(folder, recipe, token_batches(), tmp_path / "plain")
    oneshot(folder, recipe, token_batches(), tmp_path / "propagated", propagate_error=True)
    plain, propagated = (read(tmp_path / n) for n in ("plain", "propagated"))
    same = {n for n in plain if torch.equal(plain[n], propagated[n])}
    differing = set(plain) - same
    assert all("layers.0" not in name for name in differing)
    assert any("layers.1" in name for name in differing)


@pytest.mark.parametrize("given", ["folder", "module"])
def test_stacked_experts_keep_the_names_of_the_source(given: str, tmp_path: Path) -> None:
    """transformers joins experts on loading; the file holds them one by one."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    model = small_model("qwen3_moe", **sizes, moe_intermediate_size=128)
    model.save_pretrained(tmp_path / "source")
    source = read(tmp_path / "source")
    assert "model.layers.0.mlp.experts.0.gate_proj.weight" in source
    modifier = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head", "re:.*mlp.gate$"])
    model = tmp_path / "source" if given == "folder" else model
    result = oneshot(model, modifier, None, tmp_path / "q")
    written = read(tmp_path / "q")
    assert set(source) <= set(written)
    assert written["model.layers.0.self_attn.q_proj.weight"].dtype == FP8
    expert = "model.layers.0.mlp.experts.0.gate_proj"
    assert expert in result.modules and written[f"{expert}.weight"].dtype == FP8
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    assert bool(torch.isfinite(logits(loaded)).all())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "mistral", "phi3", "opt"])
def test_families(family: str, tmp_path: Path) -> None:
    """Static activations, from a folder, loaded by transformers."""
    model = small_model(family)
    model.save_pretrained(tmp_path / "source")
    modifier = QuantizationModifier(ignore=["lm_head"], **group("group_0"))
    oneshot(tmp_path / "source", modifier, token_batches(), tmp_path / "q")
    oneshot(model, modifier, token_batches())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "q", dtype=torch.bfloat16)
    assert_close(logits(loaded), logits(model), rtol=0, atol=0)
