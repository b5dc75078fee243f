"""`save_pretrained` of a module that was quantized: what llm-compressor's scripts call."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from families import read, small_model, token_batches
from safetensors.torch import load_file
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.errors import CheckpointError, PlanError
from steelyard.formats import format_of
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.recipes import load_recipe

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
STATES = {"num_bits": 8, "type": "float", "strategy": "tensor", "observer": "static_minmax"}


def quantized(modifier: Any = None, **options: Any) -> Any:
    model = small_model("llama", **SIZES)
    modifier = modifier or QuantizationModifier(ignore=["lm_head"], **options)
    oneshot(model, modifier, token_batches() if load_recipe(modifier).needs_data else None)
    return model


@torch.no_grad()
def logits(model: Any) -> torch.Tensor:
    return model(token_batches(seed=9)[0]).logits


def loaded(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    logits(model)  # decompresses
    return model


def config_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


# -- the same folder again ------------------------------------------------------------------------


def test_second_save_replaces_the_first(tmp_path: Path) -> None:
    quantized(scheme="W4A16").save_pretrained(tmp_path / "q", save_compressed=True)
    first = config_of(tmp_path / "q")["quantization_config"]["format"]
    model = quantized(scheme="FP8_DYNAMIC")
    model.save_pretrained(tmp_path / "q", save_compressed=True)
    assert (first, config_of(tmp_path / "q")["quantization_config"]["format"]) == (
        "pack-quantized",
        "float-quantized",
    )
    assert not any("weight_packed" in name for name in read(tmp_path / "q"))
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


def test_a_folder_that_is_not_to_be_replaced(tmp_path: Path) -> None:
    model = quantized(scheme="W4A16")
    model.save_pretrained(tmp_path / "q")
    before = read(tmp_path / "q")
    with pytest.raises(CheckpointError, match="overwrite=True"):
        model.save_pretrained(tmp_path / "q", overwrite=False)
    assert_close(read(tmp_path / "q"), before, rtol=0, atol=0)


@pytest.mark.parametrize("before", ["model", "nothing"])
def test_tokenizer_that_a_script_saved_first_stays(before: str, tmp_path: Path) -> None:
    """Scripts save the tokenizer before or after the model, and run twice."""
    model = quantized(scheme="W8A8")
    (tmp_path / "q").mkdir()
    if before == "model":
        model.save_pretrained(tmp_path / "q")
    (tmp_path / "q" / "tokenizer.json").write_text('{"version": "1.0"}')
    (tmp_path / "q" / "chat_template.jinja").write_text("hello")
    model.save_pretrained(tmp_path / "q")
    assert (tmp_path / "q" / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert (tmp_path / "q" / "chat_template.jinja").read_text() == "hello"
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize("name", ["thesis.txt", "config.json", "run/events.log"])
def test_other_folders_are_never_replaced(name: str, tmp_path: Path) -> None:
    model = quantized(scheme="W8A8")
    path = tmp_path / "q" / name
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="not replaced"):
        model.save_pretrained(tmp_path / "q")
    assert path.read_text() == "{}" and len(list((tmp_path / "q").iterdir())) == 1
    model.save_pretrained(tmp_path / "other")  # nothing is lost


# -- formats --------------------------------------------------------------------------------------

FORMATS = (
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "pack-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mxfp8-quantized",
)


@pytest.mark.parametrize(
    "scheme", ["W4A16", "W8A8", "W4AFP8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16"]
)
def test_chosen_format_is_written_and_loads_or_is_refused(scheme: str, tmp_path: Path) -> None:
    """Whatever is accepted gives the same logits in transformers."""
    if scheme not in PRESET_SCHEMES:
        pytest.skip(f"this compressed-tensors has no {scheme}")
    model = quantized(scheme=scheme)
    expected = logits(model)
    accepted = []
    for name in FORMATS:
        folder = tmp_path / name
        try:
            model.save_pretrained(folder, quantization_format=name)
        except CheckpointError as error:
            assert name in str(error) and "remove the option to use" in str(error)
            assert not folder.exists()
            continue
        accepted.append(name)
        stored = config_of(folder)["quantization_config"]
        assert stored["format"] == stored["config_groups"]["group_0"]["format"] == name
        assert_close(logits(loaded(folder)), expected, rtol=0, atol=0, msg=name)
    own = format_of(model.model.layers[0].mlp.up_proj.quantization_scheme)
    assert own in accepted
    if scheme in ("W4A16", "W8A8", "W4AFP8"):
        assert {"pack-quantized", "naive-quantized"} <= set(accepted)
    else:
        assert "pack-quantized" not in accepted


@pytest.mark.parametrize(
    ("name", "said"),
    [("pack-quantised", "pack-quantized"), ("marlin-24", "known"), ("mixed-precision", "known")],
)
def test_unknown_format_is_named(name: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        quantized(scheme="W4A16").save_pretrained(tmp_path / "q", quantization_format=name)
    assert not (tmp_path / "q").exists()


# -- not compressed -------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["W4A16", "NVFP4A16", "W4A16_ASYM", "GPTQ", "dense"])
def test_uncompressed_is_an_ordinary_model_with_rounded_weights(way: str, tmp_path: Path) -> None:
    original = read_plain(tmp_path / "plain")
    modifier = GPTQModifier(scheme="W4A16", ignore=["lm_head"]) if way == "GPTQ" else None
    model = quantized(modifier, scheme="W4A16" if way == "dense" else way)
    options = {"quantization_format": "dense"} if way == "dense" else {"save_compressed": False}
    model.save_pretrained(tmp_path / "q", **options)
    written = read(tmp_path / "q")
    assert {n: (t.shape, t.dtype) for n, t in written.items()} == {
        n: (t.shape, t.dtype) for n, t in original.items()
    }
    assert "quantization_config" not in config_of(tmp_path / "q")
    name = "model.layers.0.mlp.up_proj.weight"
    assert not torch.equal(written[name], original[name])
    if way != "NVFP4A16":  # 16 codes in each group of 128
        rows = written[name].reshape(-1, 128)
        assert max(len(row.unique()) for row in rows) <= 16
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


def read_plain(folder: Path) -> dict[str, torch.Tensor]:
    small_model("llama", **SIZES).save_pretrained(folder)
    return read(folder)


def test_uncompressed_says_which_parts_are_lost(tmp_path: Path) -> None:
    model = quantized(scheme="FP8_DYNAMIC", kv_cache_scheme=STATES)
    with pytest.warns(UserWarning, match="activations and the KV cache are not quantized"):
        model.save_pretrained(tmp_path / "q", save_compressed=False)
    assert not any("scale" in name for name in read(tmp_path / "q"))
    loaded(tmp_path / "q")


def test_format_of_an_uncompressed_model_is_refused(tmp_path: Path) -> None:
    model = quantized(scheme="W4A16")
    with pytest.raises(CheckpointError, match="save_compressed"):
        model.save_pretrained(
            tmp_path / "q", save_compressed=False, quantization_format="pack-quantized"
        )


# -- attention ------------------------------------------------------------------------------------


def attention_group(*targets: str) -> dict[str, Any]:
    return {"targets": list(targets), "input_activations": STATES}


def test_quantized_attention_implies_a_quantized_cache(tmp_path: Path) -> None:
    """vLLM reads kv_cache_scheme; compressed-tensors derives it from the attention's states."""
    from compressed_tensors.quantization import QuantizationConfig

    model = quantized(config_groups={"attention": attention_group("LlamaAttention")})
    model.save_pretrained(tmp_path / "q")
    stored = config_of(tmp_path / "q")["quantization_config"]["kv_cache_scheme"]
    derived = QuantizationConfig.from_pretrained(model)
    assert derived is not None and derived.kv_cache_scheme is not None
    assert stored == json.loads(derived.kv_cache_scheme.model_dump_json())
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


def test_cache_of_attention_in_two_schemes_is_not_promised(tmp_path: Path) -> None:
    """kv_cache_scheme holds for all modules alike."""
    other = {**attention_group(r"re:model\.layers\.1\.self_attn$")}
    other["input_activations"] = {**STATES, "strategy": "attn_head"}
    groups = {"first": attention_group(r"re:model\.layers\.0\.self_attn$"), "second": other}
    model = quantized(config_groups=groups)
    model.save_pretrained(tmp_path / "q")
    assert config_of(tmp_path / "q")["quantization_config"]["kv_cache_scheme"] is None
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


def test_attention_of_some_layers_alone_is_refused_in_the_plan() -> None:
    """compressed-tensors hooks the attention of the whole model, and fails in the other layers."""
    with pytest.raises(PlanError, match=r"1 of 2 attention modules.*not model\.layers\.1"):
        quantized(config_groups={"one": attention_group(r"re:model\.layers\.0\.self_attn$")})


# -- other options --------------------------------------------------------------------------------


def test_options_of_llm_compressor_and_transformers_are_taken(tmp_path: Path) -> None:
    model = quantized(scheme="W8A8")
    model.save_pretrained(
        tmp_path / "q",
        max_shard_size="100KB",
        safe_serialization=True,
        skip_sparsity_compression_stats=True,
        disable_sparse_compression=True,
        sparsity_config=None,
        push_to_hub=False,
        is_main_process=True,
    )
    files = list((tmp_path / "q").glob("*.safetensors"))
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert len(sizes) > 2 and max(sizes) <= 100_000
    assert_close(logits(loaded(tmp_path / "q")), logits(model), rtol=0, atol=0)


@pytest.mark.parametrize(
    "option", [{"safe_serialization": False}, {"push_to_hub": True}, {"varaint": "fp16"}]
)
def test_options_without_effect_are_named(option: dict[str, Any], tmp_path: Path) -> None:
    model = quantized(scheme="W8A8")
    with pytest.warns(UserWarning, match=next(iter(option))):
        model.save_pretrained(tmp_path / "q", **option)
    assert (tmp_path / "q" / "config.json").exists()


def test_another_process_does_not_write(tmp_path: Path) -> None:
    quantized(scheme="W8A8").save_pretrained(tmp_path / "q", is_main_process=False)
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("size", ["5 gigs", 0, "-1GB"])
def test_shard_sizes_that_are_none(size: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="max_shard_size"):
        quantized(scheme="W8A8").save_pretrained(tmp_path / "q", max_shard_size=size)
