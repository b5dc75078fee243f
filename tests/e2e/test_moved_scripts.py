"""Scripts for llm-compressor run after their import root is changed, twice into the same folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from families import read
from moved_scripts import SCRIPTS, script
from transformers import AutoModelForCausalLM, AutoTokenizer

from steelyard.checkpoint.validator import validate_checkpoint
from steelyard.demo import model_folder

UP = "model.layers.0.mlp.up_proj"
SCALES = {"weight_scale"}
EXPECTED = {
    "gptq, tokenized rows": ("pack-quantized", {"weight_packed", "weight_shape"} | SCALES),
    "data-free, tokenizer first": ("float-quantized", {"weight"} | SCALES),
    "weights for fp8 activations, packed": (
        "pack-quantized",
        {"weight_packed", "weight_shape"} | SCALES,
    ),
    "recipe in yaml, with a cache": ("float-quantized", {"weight", "input_scale"} | SCALES),
    "static activations, preprocessing": ("float-quantized", {"weight", "input_scale"} | SCALES),
    "ignores of other families, dataset by its short name": (
        "nvfp4-pack-quantized",
        {"weight_packed", "weight_global_scale", "input_global_scale"} | SCALES,
    ),
    "schemes of compressed-tensors by target": (
        "mixed-precision",
        {"weight_packed", "weight_shape"} | SCALES,
    ),
    "smoothing, then gptq": ("int-quantized", {"weight"} | SCALES),
    "importance of inputs": ("pack-quantized", {"weight_packed", "weight_shape"} | SCALES),
    "min-max scales": ("pack-quantized", {"weight_packed", "weight_shape"} | SCALES),
    "from files": ("float-quantized", {"weight"} | SCALES),
}


@pytest.mark.filterwarnings("ignore:calibrating on:steelyard.errors.CalibrationWarning")
@pytest.mark.parametrize("name", SCRIPTS)
def test_script_runs_twice_and_leaves_a_checkpoint(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets, "load_dataset", datasets.load_dataset)  # scripts replace it
    out = tmp_path / "out"
    text = script(name, "steelyard", str(model_folder()), str(out))
    exec(compile(text, name, "exec"), {})
    first = {n: t.clone() for n, t in read(out).items()}
    exec(compile(text, name, "exec"), {})
    again = read(out)
    assert first.keys() == again.keys()
    assert all(torch.equal(first[n], again[n]) for n in first)
    form, leaves = EXPECTED[name]
    assert {n.removeprefix(f"{UP}.") for n in again if n.startswith(UP)} == leaves
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == form
    assert (config["kv_cache_scheme"] is not None) == ("cache" in name)
    assert ("model.layers.0.self_attn.k_scale" in again) == ("cache" in name)
    assert validate_checkpoint(out) == []
    tokens = AutoTokenizer.from_pretrained(out)("def f(x):", return_tensors="pt")
    model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    assert torch.isfinite(model(tokens["input_ids"]).logits).all()
