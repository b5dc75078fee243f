"""Model classes beside the usual decoders run on data, or are refused with a sentence."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from block_runs import plain_outputs, run_in_sequence
from families import COMMON, read, small_model, token_batches
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.errors import DataError, PipelineError
from steelyard.model.source import Source
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.observers.min_max import StaticMinMaxObserver

TEXT = {**COMMON, "num_hidden_layers": 2, "head_dim": 16}
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 8,
}
ENCODER = {
    "vocab_size": 128,
    "d_model": 64,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "decoder_start_token_id": 1,
}
MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "attn_layer_indices": [1],
}
MOE = {
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "intermediate_size_mlp": 64,
    "interleave_moe_layer_step": 1,
}
SPARSE = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
    "index_topk": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "num_key_value_heads": 4,
    "n_group": 1,
    "topk_group": 1,
}
CLASSES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bamba": ("BambaForCausalLM", "BambaConfig", {**COMMON, **MAMBA, "num_hidden_layers": 2}),
    "llama4": ("Llama4ForCausalLM", "Llama4TextConfig", {**TEXT, **MOE}),
    "glm5": (
        "GlmMoeDsaForCausalLM",
        "GlmMoeDsaConfig",
        {**{k: v for k, v in TEXT.items() if k != "head_dim"}, **SPARSE},
    ),
    "rwkv": (
        "RwkvForCausalLM",
        "RwkvConfig",
        {"vocab_size": 128, "hidden_size": 64, "num_hidden_layers": 2, "context_length": 64},
    ),
    "mllama": (
        "MllamaForConditionalGeneration",
        "MllamaConfig",
        {
            "text_config": {**TEXT, "cross_attention_layers": [1]},
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 16,
                "patch_size": 8,
                "intermediate_layers_indices": [0],
                "vision_output_dim": 64,
            },
            "image_token_index": 127,
        },
    ),
    "qwen3_5": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        {
            "text_config": {
                **TEXT,
                "layer_types": ["linear_attention", "full_attention"],
                "linear_num_value_heads": 4,
                "linear_num_key_heads": 2,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "vision_config": {
                "depth": 2,
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_heads": 2,
                "patch_size": 8,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
            },
            "image_token_id": 120,
            "video_token_id": 121,
            "vision_start_token_id": 122,
            "vision_end_token_id": 123,
        },
    ),
    "gemma3": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        {
            "text_config": {**TEXT, "layer_types": ["sliding_attention", "full_attention"]},
            "vision_config": VISION,
            "mm_tokens_per_image": 4,
            "image_token_index": 127,
        },
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        {**ENCODER, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 64},
    ),
}


def build(kind: str) -> Any:
    name, config, options = CLASSES[kind]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**options)
    return getattr(transformers, name)._from_config(made).to(torch.bfloat16).eval()


def save(kind: str, folder: Path) -> Path:
    build(kind).save_pretrained(folder)
    return folder


def loading_report(kind: str, folder: Path) -> dict[str, Any]:
    """Return what transformers missed or did not expect when it loads the class of the config."""
    whole = getattr(transformers, CLASSES[kind][0])
    _, report = whole.from_pretrained(folder, dtype=torch.bfloat16, output_loading_info=True)
    return {key: value for key, value in report.items() if value}


def fp8() -> QuantizationModifier:
    return QuantizationModifier(scheme="FP8", ignore=["re:.*lm_head", "re:.*router"])


def run(model: Any, output: Path | None = None, recipe: Any = None, **options: Any) -> Any:
    return oneshot(model, recipe or fp8(), token_batches(), output, show_progress=False, **options)


# -- classes that run -------------------------------------------------------------------------


def test_layers_that_return_more_than_the_hidden_state_give_the_plain_logits() -> None:
    model, batches = build("bamba"), token_batches()
    expected = [out.logits for out in plain_outputs(model, batches)]
    found = [out.logits for out in run_in_sequence(Source.open(model), batches)]
    assert_close(found, expected, rtol=0, atol=0)


def test_a_hybrid_model_is_calibrated_from_a_folder(tmp_path: Path) -> None:
    result = run(save("bamba", tmp_path / "m"), tmp_path / "q")
    assert {"model.layers.0.mamba.in_proj", "model.layers.1.self_attn.q_proj"} <= set(
        result.modules
    )
    assert all(module.tokens for module in result.modules.values())


def test_a_router_that_is_a_linear_of_its_own_kind_does_not_break_gptq(tmp_path: Path) -> None:
    weights = {"num_bits": 4, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = GPTQModifier(config_groups=groups, ignore=["lm_head"])
    result = run(save("llama4", tmp_path / "m"), tmp_path / "q", recipe)
    assert all(module.error is not None for module in result.modules.values())


def test_experts_that_stay_stacked_where_transformers_wants_a_list_are_told(tmp_path: Path) -> None:
    """Of a quantized Llama 4, transformers makes each expert Linear layers of its own."""
    recipe = QuantizationModifier(scheme="FP8", ignore=["lm_head", "re:.*experts.*"])
    plan = run(save("llama4", tmp_path / "m"), tmp_path / "q", recipe, dry_run=True).plan
    assert any("does not load experts as they are stored" in each for each in plan.warnings)


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
def test_modules_that_saw_no_token_are_named_as_in_the_files(tmp_path: Path, pipeline: str) -> None:
    source = save("gemma3", tmp_path / "m")
    run(source, tmp_path / "q", pipeline=pipeline, uncalibrated="weights-only")
    config = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    targets = config["config_groups"]["weights_only_0"]["targets"]
    stored = {name.removesuffix(".weight") for name in read(source)}
    assert stored.intersection(targets)
    assert {name.removeprefix("model.") for name in targets} == stored.intersection(targets)


def test_a_class_whose_head_is_called_decoder_has_its_layers_found() -> None:
    config = transformers.ModernBertDecoderConfig(
        **{**COMMON, "num_hidden_layers": 2, "local_attention": 8}
    )
    model = transformers.ModernBertDecoderForCausalLM._from_config(config).eval()
    result = oneshot(
        model,
        QuantizationModifier(scheme="FP8", ignore=["re:.*decoder", "lm_head"]),
        token_batches(),
        show_progress=False,
    )
    assert any(name.startswith("model.layers.1.") for name in result.modules)


# -- classes that are refused -----------------------------------------------------------------


@pytest.mark.parametrize("loaded", [False, True])
def test_token_ids_alone_are_refused_by_a_model_of_speech(loaded: bool, tmp_path: Path) -> None:
    model = build("whisper") if loaded else save("whisper", tmp_path / "m")
    message = r"the forward of Whi\w+ does not accept input_ids \(1, \d+\); remove it"
    with pytest.raises(DataError, match=message):
        run(model, tmp_path / "q", QuantizationModifier(scheme="FP8", ignore=["lm_head"]))
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("kind", ["glm5", "mllama"])
@pytest.mark.parametrize("pipeline", ["auto", "basic"])
def test_layers_that_pass_on_more_than_a_hidden_state_are_calibrated(
    kind: str, pipeline: str, tmp_path: Path
) -> None:
    """GLM-5 hands indices from layer to layer; Mllama skips its cross attention without images."""
    folder = save(kind, tmp_path / "m")
    result = run(folder, tmp_path / "q", pipeline=pipeline, uncalibrated="weights-only")
    decoder = {n: m for n, m in result.modules.items() if "vision" not in n}
    assert all(m.tokens for n, m in decoder.items() if "layers.0.self_attn" in n)
    assert loading_report(kind, tmp_path / "q") == {}


@pytest.mark.parametrize("scheme", ["FP8", "GPTQ"])
def test_a_model_whose_tower_sees_no_image_loads_whole(scheme: str, tmp_path: Path) -> None:
    """Calibrated with text alone, so that no token reaches the vision tower."""
    weights = {"num_bits": 8, "strategy": "channel"}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    recipe = fp8() if scheme == "FP8" else GPTQModifier(config_groups=groups)
    source = save("qwen3_5", tmp_path / "m")
    result = run(source, tmp_path / "q", recipe, uncalibrated="weights-only")
    assert result.modules and not [w for w in result.plan.warnings if w.startswith("transformers")]
    assert loading_report("qwen3_5", tmp_path / "q") == {}


def test_a_model_that_changes_its_own_weights_is_refused() -> None:
    with pytest.raises(PipelineError, match="RwkvForCausalLM changes its own weights"):
        run(build("rwkv"))


def test_what_needs_more_than_token_ids_is_refused_before_any_work() -> None:
    class WithImages(transformers.LlamaForCausalLM):
        def forward(self, pixel_values: Any, input_ids: Any = None, **options: Any) -> Any:
            raise AssertionError

    model = WithImages(small_model("llama").config)
    with pytest.raises(DataError, match="WithImages needs pixel_values, and the sample has input"):
        run(model)


# -- forwards that fail -----------------------------------------------------------------------


@pytest.mark.parametrize("pipeline", ["sequential", "basic"])
@pytest.mark.parametrize("kind", [ValueError, KeyError, TypeError, AssertionError])
def test_an_exception_of_the_models_own_code_names_class_and_layer(
    kind: type[Exception], pipeline: str
) -> None:
    model = small_model("llama")
    layer = model.model.layers[1]

    def broken(*_args: Any, **_kwargs: Any) -> Any:
        raise kind("two heads are better than one")

    layer.mlp.forward = broken
    with pytest.raises(PipelineError) as caught:
        run(model, pipeline=pipeline)
    said = str(caught.value)
    assert said.startswith("LlamaForCausalLM cannot be calibrated: its own forward fails in ")
    assert kind.__name__ in said and "two heads are better than one" in said
    if pipeline == "sequential":
        assert "model.layers.1 " in said
    assert isinstance(caught.value.__cause__, kind)


def test_a_failure_of_our_own_code_while_a_model_runs_is_not_blamed_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*_args: Any) -> None:
        raise AttributeError("an observer's own")

    monkeypatch.setattr(StaticMinMaxObserver, "update_statistics_from_observed", broken)
    options: Any = {"scheme": "FP8", "ignore": ["lm_head"], "activation_observer": "static_minmax"}
    with pytest.raises(AttributeError, match="an observer's own"):
        run(small_model("llama"), None, QuantizationModifier(**options))
