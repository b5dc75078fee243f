"""Models whose classes rename, join or hide what the files hold, and models that go wrong."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from families import COMMON, read, small_model, token_batches
from sample_rows import make_tokenizer
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.engine import stream as streaming
from steelyard.errors import (
    CalibrationError,
    CheckpointError,
    CheckpointInvalid,
    NonFiniteError,
    PipelineError,
)
from steelyard.modifiers import QuantizationModifier

BYTE = {"num_bits": 8, "strategy": "channel"}
STATIC = {"num_bits": 8, "strategy": "tensor"}


def static(ignore: Any = ("lm_head",), **options: Any) -> QuantizationModifier:
    scheme = {"targets": ["Linear"], "weights": BYTE, "input_activations": STATIC, **options}
    return QuantizationModifier(config_groups={"group_0": scheme}, ignore=list(ignore))


@torch.no_grad()
def cosine(folder: Path, model: Any) -> float:
    """How alike the logits of a checkpoint are to those of a model."""
    loaded = type(model).from_pretrained(folder, dtype=torch.bfloat16)
    ours, theirs = (m(token_batches(9)[0]).logits.float().flatten() for m in (loaded, model))
    return float(torch.cosine_similarity(ours, theirs, dim=0))


def vision_model() -> Any:
    """Its files say `language_model.model`, its class `model.language_model`."""
    small = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.Gemma3Config(
        text_config={**COMMON, "num_hidden_layers": 2, "head_dim": 16},
        vision_config={**small, "num_attention_heads": 2, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=120,
        boi_token_index=121,
        eoi_token_index=122,
    )
    torch.manual_seed(0)
    return transformers.Gemma3ForConditionalGeneration(config).to(torch.bfloat16).eval()


@pytest.mark.parametrize("scheme", ["FP8_DYNAMIC", "static"])
def test_names_are_those_of_the_files(scheme: str, tmp_path: Path) -> None:
    model = vision_model()
    model.save_pretrained(tmp_path / "m")
    left = ["lm_head", "re:.*vision.*", "re:.*projector.*"]
    chosen = static(left)
    data = token_batches()
    if scheme != "static":
        chosen, data = QuantizationModifier(scheme=scheme, ignore=left), None
    oneshot(tmp_path / "m", chosen, data, tmp_path / "q")
    source, written = read(tmp_path / "m"), read(tmp_path / "q")
    extra = {name.rpartition(".")[0] for name in written.keys() - source.keys()}
    assert source.keys() <= written.keys()
    assert extra and all(f"{module}.weight" in source for module in extra)
    assert cosine(tmp_path / "q", model) > 0.98


def deepseek(**changes: Any) -> Any:
    """Routes with a buffer that is saved, and with experts that its class joins."""
    ranks = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
    config = transformers.DeepseekV3Config(
        **{**COMMON, "num_key_value_heads": 4, **ranks, "v_head_dim": 8},
        moe_intermediate_size=32,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        first_k_dense_replace=1,
        **changes,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.tensor([5.0, 0.0, 0.0, 5.0]))  # experts 0 and 3, whatever comes
    return model


@pytest.mark.parametrize("given", ["folder", "module"])
def test_saved_buffers_count(given: str, tmp_path: Path) -> None:
    model = deepseek()
    model.save_pretrained(tmp_path / "m")
    source = read(tmp_path / "m")
    biases = {n: t for n, t in source.items() if n.endswith("e_score_correction_bias")}
    assert biases
    oneshot(
        tmp_path / "m" if given == "folder" else model,
        static(["lm_head", "re:.*experts.*"]),
        token_batches(),
        tmp_path / "q",
    )
    written = read(tmp_path / "q")
    assert_close({name: written[name] for name in biases}, biases, rtol=0, atol=0)
    assert source.keys() <= written.keys()


def test_layers_from_files_equal_those_in_memory(tmp_path: Path) -> None:
    """With buffers that change the routing, and experts filled from single files."""
    model = deepseek()
    model.save_pretrained(tmp_path / "m", max_shard_size="50KB")
    chosen = static(["lm_head", "re:.*experts.*"])
    first = oneshot(tmp_path / "m", chosen, token_batches(), tmp_path / "a")
    oneshot(model, chosen, token_batches(), tmp_path / "b")
    assert_close(read(tmp_path / "a"), read(tmp_path / "b"), rtol=0, atol=0)
    assert any(m.tokens for m in first.modules.values())


@pytest.mark.parametrize("stored", [torch.float32, torch.float16])
def test_types_are_those_of_the_files(stored: torch.dtype, tmp_path: Path) -> None:
    """Whatever the config says: weights are not rounded before they are quantized."""
    model = small_model("llama", stored)
    model.save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    for name, chosen, data in (
        ("free", QuantizationModifier(scheme="W8A8", ignore=["lm_head"]), None),
        ("data", static(), token_batches()),
    ):
        oneshot(tmp_path / "m", chosen, data, tmp_path / name)
        written = read(tmp_path / name)
        assert written["model.layers.0.mlp.up_proj.weight_scale"].dtype == stored
        assert written["model.norm.weight"].dtype == stored


def test_loaded_module_of_mixed_types(tmp_path: Path) -> None:
    model = small_model("llama", torch.float32).to(torch.bfloat16)  # the config still says fp32
    model.model.layers[0].mlp.up_proj.float()
    oneshot(model, QuantizationModifier(scheme="W8A8", ignore=["lm_head"]), None, tmp_path / "q")
    written = read(tmp_path / "q")
    assert written["model.layers.0.mlp.up_proj.weight_scale"].dtype == torch.float32
    assert written["model.layers.1.mlp.up_proj.weight_scale"].dtype == torch.bfloat16
    config = json.loads((tmp_path / "q" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert config["architectures"] == ["LlamaForCausalLM"]


@pytest.mark.parametrize("scheme", ["FP8", "FP8_DYNAMIC", "W4A8", "static", "KV cache"])
def test_errors_are_propagated_in_every_scheme(scheme: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
    small_model("llama", **sizes).save_pretrained(tmp_path / "m")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    chosen = {
        "static": static(),
        "KV cache": QuantizationModifier(kv_cache_scheme=cache, scheme="FP8", ignore=["lm_head"]),
    }.get(scheme)
    if chosen is None:
        weights = {"weight_observer": "imatrix_mse"}  # so that data flows through all of them
        chosen = QuantizationModifier(scheme=scheme, ignore=["lm_head"], **weights)
    found = []
    for name, propagate in (("plain", False), ("propagated", True)):
        oneshot(tmp_path / "m", chosen, token_batches(), tmp_path / name, propagate_error=propagate)
        found.append(read(tmp_path / name))
    differing = {n for n in found[0] if not torch.equal(found[0][n], found[1][n])}
    assert all("layers.0" not in name for name in differing)
    assert any("layers.1" in name for name in differing)


# -- what saw no token --------------------------------------------------------------------------


def mamba(folder: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=64, state_size=8, num_hidden_layers=2
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)


@pytest.mark.filterwarnings("ignore:transformers .* cannot load packed weights:UserWarning")
def test_modules_of_a_folder_that_saw_nothing(tmp_path: Path) -> None:
    """Mamba's `dt_proj` is never called: its weight is taken from it."""
    mamba(tmp_path / "m")
    with pytest.raises(
        CalibrationError, match=r"(?s)2 modules.*layers\.0.*layers\.1.*weights-only"
    ):
        oneshot(tmp_path / "m", static(), token_batches(), tmp_path / "q")
    both = static(output_activations=STATIC)
    oneshot(tmp_path / "m", both, token_batches(), tmp_path / "w", uncalibrated="weights-only")
    written = read(tmp_path / "w")
    idle = {name for name in written if "dt_proj" in name and name.endswith("_scale")}
    assert idle == {f"backbone.layers.{i}.mixer.dt_proj.weight_scale" for i in (0, 1)}


# -- a module that was given --------------------------------------------------------------------


def test_failure_leaves_a_loaded_module_as_it_was() -> None:
    model = small_model("llama").train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plain = model(token_batches()[0]).logits
    attributes = {name: set(vars(module)) for name, module in model.named_modules()}
    model.model.layers[1].mlp.up_proj.weight.data[0, 0] = float("nan")
    cache = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    chosen = static()
    chosen = QuantizationModifier(
        config_groups=chosen.config_groups, ignore=["lm_head"], kv_cache_scheme=cache
    )
    with pytest.raises(NonFiniteError):
        oneshot(model, chosen, token_batches())
    model.model.layers[1].mlp.up_proj.weight.data = before["model.layers.1.mlp.up_proj.weight"]
    assert_close(dict(model.state_dict()), before, rtol=0, atol=0)
    assert {name: set(vars(module)) for name, module in model.named_modules()} == attributes
    assert_close(model(token_batches()[0]).logits, plain, rtol=0, atol=0)
    oneshot(model, static(), token_batches())  # and can be quantized still


def test_training_mode_comes_back() -> None:
    model = small_model("llama").train()
    oneshot(model, static(), token_batches())
    assert model.training


def test_quantized_module_is_refused() -> None:
    model = small_model("llama")
    oneshot(model, static(), token_batches())
    with pytest.raises(PipelineError, match=r"q_proj is quantized already"):
        oneshot(model, QuantizationModifier(scheme="FP8_DYNAMIC"))


def test_source_of_a_loaded_module_is_safe(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    chosen = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])
    with pytest.raises(CheckpointError, match="source itself"):
        oneshot(model, chosen, None, tmp_path / "m", overwrite=True)


def test_attention_states_alone(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    scheme = {"targets": ["LlamaAttention"], "input_activations": {**STATIC, "type": "float"}}
    chosen = QuantizationModifier(config_groups={"group_0": scheme})
    oneshot(tmp_path / "m", chosen, token_batches(), tmp_path / "q")
    written = read(tmp_path / "q")
    for state in "qkv":
        assert float(written[f"model.layers.0.self_attn.{state}_scale"]) > 0


# -- mistakes -----------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [None, 3, torch.nn.Sequential(torch.nn.Linear(2, 2))])
def test_things_that_are_no_model(given: Any, tmp_path: Path) -> None:
    with pytest.raises(PipelineError, match=r"pass a folder|pass one loaded"):
        oneshot(given, static(), token_batches(), tmp_path / "q")


def test_architecture_that_transformers_does_not_know(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "model_type": "nobody"}))
    with pytest.raises(PipelineError, match=r"'nobody'.*from the files alone"):
        oneshot(tmp_path / "m", static(), token_batches(), tmp_path / "q")


def test_config_of_another_model(tmp_path: Path) -> None:
    small_model("llama").save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "intermediate_size": 96}))
    with pytest.raises(PipelineError, match=r"\(128, 64\).*config\.json implies \(96, 64\)"):
        oneshot(tmp_path / "m", static(), token_batches(), tmp_path / "q")


def test_tensors_that_the_class_does_not_know_are_listed(tmp_path: Path) -> None:
    small_model("llama", num_hidden_layers=3).save_pretrained(tmp_path / "m")
    path = tmp_path / "m" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_hidden_layers": 2}))
    result = oneshot(tmp_path / "m", static(), token_batches(), tmp_path / "q")
    reasons = {left.name: left.reason for left in result.plan.left}
    assert "not part of LlamaForCausalLM" in reasons["model.layers.2.mlp.up_proj"]
    source, written = read(tmp_path / "m"), read(tmp_path / "q")
    name = "model.layers.2.mlp.up_proj.weight"
    assert_close(written[name], source[name], rtol=0, atol=0)
    size = sum(tensor.nbytes for tensor in written.values())
    assert result.plan.output_bytes == size


def test_tokenizer_that_was_given_is_written(tmp_path: Path) -> None:
    class Tokenizer:
        def save_pretrained(self, folder: str) -> None:
            (Path(folder) / "tokenizer.model").write_bytes(b"\xff\x00")

    model = small_model("llama")
    chosen = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])
    model.save_pretrained(tmp_path / "m")
    oneshot(tmp_path / "m", chosen, None, tmp_path / "a", tokenizer=Tokenizer())
    oneshot(model, chosen, None, tmp_path / "b", tokenizer=Tokenizer())
    make_tokenizer().save_pretrained(tmp_path / "t")
    oneshot(tmp_path / "m", chosen, None, tmp_path / "c", tokenizer=tmp_path / "t")
    assert (tmp_path / "a" / "tokenizer.model").read_bytes() == b"\xff\x00"
    assert (tmp_path / "b" / "tokenizer.model").read_bytes() == b"\xff\x00"
    given = (tmp_path / "t" / "tokenizer.json").read_bytes()
    assert (tmp_path / "c" / "tokenizer.json").read_bytes() == given


# -- what is found wrong after writing ----------------------------------------------------------


@pytest.mark.parametrize("wrong", ["weight", "weight_scale", "weight_global_scale"])
def test_wrong_bytes_are_found_before_the_old_output_goes(
    wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel that errs would be caught by the reported error, the scales or the fused partner."""
    small_model("llama", hidden_size=256, intermediate_size=256).save_pretrained(tmp_path / "m")
    (tmp_path / "q").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "q" / name).write_text("kept")
    stored = streaming.stored_tensors
    calls: list[int] = []

    def damaged(weight: torch.Tensor, *args: Any, **options: Any) -> dict[str, torch.Tensor]:
        found = dict(stored(weight, *args, **options))
        calls.append(1)
        if len(calls) == 1:  # the first q_proj
            if wrong == "weight":
                found["weight_packed"] = found["weight_packed"].flip(0)
            elif wrong == "weight_scale":
                found["weight_scale"] = torch.zeros_like(found["weight_scale"])
            else:
                found["weight_global_scale"] = found["weight_global_scale"] * 2
        return found

    monkeypatch.setattr(streaming, "stored_tensors", damaged)
    chosen = QuantizationModifier(scheme="NVFP4A16", ignore=["lm_head", "re:.*mlp.*"])
    message = {"weight": "decodes with a relative error", "weight_scale": "zero"}
    message["weight_global_scale"] = "fused partner|decodes"
    with pytest.raises(CheckpointInvalid, match=message[wrong]):
        oneshot(tmp_path / "m", chosen, None, tmp_path / "q", overwrite=True)
    assert (tmp_path / "q" / "model.safetensors").read_text() == "kept"


def test_scale_is_that_of_the_type_that_is_served(tmp_path: Path) -> None:
    """The pass runs in fp32, but what is observed is what a server in bf16 would see."""
    model = small_model("llama", torch.bfloat16)
    model.save_pretrained(tmp_path / "m")
    seen: list[torch.Tensor] = []
    wide = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype=torch.float32)
    wide.model.layers[2].mlp.down_proj.register_forward_pre_hook(
        lambda _module, args: seen.append(args[0].to(torch.bfloat16).abs().max())
    )
    batches = token_batches()
    with torch.no_grad():
        for batch in batches:
            wide(batch)
    observed = {**STATIC, "observer": "static_minmax"}
    oneshot(tmp_path / "m", static(input_activations=observed), batches, tmp_path / "q")
    scale = read(tmp_path / "q")["model.layers.2.mlp.down_proj.input_scale"]
    expected = (torch.stack(seen).max().float() / 127.5).to(torch.bfloat16)
    assert_close(scale, expected.reshape(1), rtol=0, atol=0)
