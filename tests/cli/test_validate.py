"""validate: exit code 1 and the list of problems, 0 and one line where there are none."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from commands import Command
from families import read
from safetensors.torch import save_file

from steelyard.checkpoint import validate_checkpoint


def test_good_and_damaged(
    steelyard: Command, process: Command, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "NVFP4A16").code == 0
    good = steelyard("validate", folder, "--source", model)
    assert good == (0, f"{folder} is good: 21 quantized modules checked, against {model}\n", "")
    tensors = read(folder)
    tensors["model.layers.1.self_attn.k_proj.weight_global_scale"] *= 2
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(tensors, folder / "model.safetensors")
    bad = process("validate", "q", "--json")
    assert bad.code == 1
    problems = bad.document["problems"]
    assert set(validate_checkpoint(folder)) < set(problems)
    assert any("up_proj.weight_scale is missing" in problem for problem in problems)
    assert any("fused partner" in problem for problem in problems)


def test_in_process(steelyard: Command, model: Path, tmp_path: Path) -> None:
    plain = steelyard("validate", model)
    assert plain.code == 1
    assert "so this is no quantized model" in plain.out
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--scheme", "W8A8").code == 0
    tensors = read(folder)
    tensors["model.norm.weight"] += 1
    save_file(tensors, folder / "model.safetensors")
    assert steelyard("validate", folder).code == 0
    answer = steelyard("validate", folder, "--source", model)
    assert answer.code == 1
    assert "problem: model.norm.weight is not quantized, but its values differ" in answer.out
    assert "1 problem in" in answer.out


def test_negative_scales_that_were_asked_for_are_good(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "QuantizationModifier:\n  scheme: W4A16\n  ignore: [lm_head]\n"
        "  weight_observer: {name: optimal, negative_scales: true}\n"
    )
    folder = tmp_path / "q"
    assert steelyard("quantize", model, "-o", folder, "--recipe", recipe).code == 0
    scales = [t for n, t in read(folder).items() if n.endswith("weight_scale")]
    assert any(bool((scale < 0).any()) for scale in scales), "else this shows nothing"
    assert all(bool(torch.isfinite(scale).all()) for scale in scales)
    assert steelyard("validate", folder).code == 0


def test_quantized_embedding_that_the_head_shares(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    """Made of an untied model, since a plan refuses a tied one."""
    folder = tmp_path / "q"
    targets = ["--targets", "model.embed_tokens"]
    answer = steelyard("quantize", model, "-o", folder, "--scheme", "W8A16", *targets)
    assert answer.code == 0, answer.err
    assert steelyard("validate", folder).code == 0
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    tensors = {name: tensor for name, tensor in read(folder).items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors")
    answer = steelyard("validate", folder)
    assert answer.code == 1
    assert "model.embed_tokens is quantized and shares its weight with lm_head" in answer.out
