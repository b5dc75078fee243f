"""What cannot end well is refused before any work, or ends well."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from families import read, small_model, token_batches
from sample_rows import make_tokenizer

from steelyard import oneshot
from steelyard.errors import CheckpointError, DataError, PlanError
from steelyard.modifiers import QuantizationModifier


def w8a8() -> QuantizationModifier:
    return QuantizationModifier(scheme="W8A8", ignore=["lm_head"])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    small_model("llama").save_pretrained(tmp_path / "m")
    return tmp_path / "m"


@pytest.mark.parametrize("given", ["nobody/nothing", "missing", "empty", "config"])
def test_a_tokenizer_that_does_not_load_is_refused_before_the_work(
    given: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    for name in ("empty", "config"):
        (tmp_path / name).mkdir()
    (tmp_path / "config" / "config.json").write_text((folder / "config.json").read_text())
    tokenizer = given if "/" in given else str(tmp_path / given)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(DataError, match="tokenizer"):
        oneshot(folder, w8a8(), output_dir=tmp_path / "q", tokenizer=tokenizer)
    assert sorted(tmp_path.iterdir()) == before


def test_a_tokenizer_on_the_hub_comes_along(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    model, commit = cache / "models--org--name", "0" * 40
    make_tokenizer().save_pretrained(model / "snapshots" / commit)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text(commit)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    oneshot(folder, w8a8(), output_dir=tmp_path / "q", tokenizer="org/name", show_progress=False)
    assert (tmp_path / "q" / "tokenizer.json").is_file()


@pytest.mark.parametrize("text", [[], "llama", 3])
@pytest.mark.parametrize("needs_data", [False, True])
def test_a_text_config_that_is_no_object_is_refused(
    text: Any, needs_data: bool, folder: Path, tmp_path: Path
) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": text}))
    scheme, data = ("FP8", token_batches()) if needs_data else ("W8A8", None)
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
    with pytest.raises(CheckpointError, match=r"text_config .* which is not an object"):
        oneshot(folder, recipe, data, tmp_path / "q")


def test_a_text_config_of_null_is_none(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "text_config": None}))
    oneshot(folder, w8a8(), output_dir=tmp_path / "q", show_progress=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_nvfp4_keeps_an_outlier(dtype: torch.dtype, tmp_path: Path) -> None:
    """The run compares what compressed-tensors decodes, in bf16, with the fp16 source."""
    model = small_model("llama", dtype=dtype)
    name = "model.layers.0.mlp.down_proj"
    model.get_submodule(name).weight.data[3, 5] = 5000.0
    model.save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(scheme="NVFP4A16", ignore=["lm_head"])
    oneshot(tmp_path / "m", recipe, output_dir=tmp_path / "q", show_progress=False)
    stored = read(tmp_path / "q")
    code = int(stored[f"{name}.weight_packed"][3, 2]) >> 4  # column 5 is the upper half
    assert code == 0b0111  # 6.0, the largest
    scale = stored[f"{name}.weight_scale"][3, 0].float() / stored[f"{name}.weight_global_scale"]
    assert 6 * float(scale) == pytest.approx(5000, rel=2**-7)


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16", "FP8_DYNAMIC"])
def test_weights_whose_squares_vanish_are_written(scheme: str, tmp_path: Path) -> None:
    """Their error was reported as 0, and the check after writing found 1."""
    model = small_model("llama", tie_word_embeddings=False)
    model.model.layers[0].self_attn.q_proj.weight.data.fill_(1e-40)
    model.model.layers[1].self_attn.q_proj.weight.data.zero_()
    model.save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
    result = oneshot(tmp_path / "m", recipe, output_dir=tmp_path / "q", show_progress=False)
    assert result.modules["model.layers.0.self_attn.q_proj"].error == 1
    assert result.modules["model.layers.1.self_attn.q_proj"].error == 0
    assert "model.layers.0.self_attn.q_proj.weight_scale" in read(tmp_path / "q")


@pytest.mark.parametrize("target", ["lm_head", "re:.*lm_head$"])
def test_a_model_without_a_head_is_no_spelling_mistake(target: str, tmp_path: Path) -> None:
    small_model("llama", tie_word_embeddings=True).model.save_pretrained(tmp_path / "m")
    recipe = QuantizationModifier(scheme="W8A16", targets=[target])
    with pytest.raises(PlanError, match=r"matches no module: the model has no output head"):
        oneshot(tmp_path / "m", recipe, output_dir=tmp_path / "q", show_progress=False)
