"""Targets by the names of the files and by those of the class mean the same modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from compressed_tensors.utils.match import match_name
from families import assert_same_tensors, other_model, read, token_batches
from model_matrix import matrix_model
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.doctor import validate_folder
from steelyard.model.module_names import targets_for
from steelyard.model.opening import open_model
from steelyard.modifiers import GPTQModifier, QuantizationModifier

FILES, CLASS = "re:.*experts.*w[123]$", "re:.*experts.*(gate|up|down)_proj$"


def recipe(kind: str, target: str) -> Any:
    modifier = GPTQModifier if kind == "gptq" else QuantizationModifier
    return modifier(scheme="W4A16", group_size=32, targets=[target])


def loaded(folder: Path) -> Any:
    return transformers.MixtralForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its files have w1, w2 and w3, its class stacks, which run as gate_proj, up_proj, ..."""
    folder = tmp_path_factory.mktemp("mixtral") / "m"
    matrix_model("mixtral").save_pretrained(folder)
    assert any(name.endswith("block_sparse_moe.experts.0.w1.weight") for name in read(folder))
    return folder


@pytest.mark.parametrize("kind", ["nearest", "gptq"])
def test_experts_by_either_name(kind: str, mixtral: Path, tmp_path: Path) -> None:
    data = token_batches() if kind == "gptq" else None
    configs = []
    for target, place in ((FILES, "files"), (CLASS, "class")):
        result = oneshot(mixtral, recipe(kind, target), data, tmp_path / place)
        assert len(result.modules) == 2 * 4 * 3
        config = json.loads((tmp_path / place / "config.json").read_text())
        configs.append(config["quantization_config"]["config_groups"]["group_0"]["targets"])
    assert_same_tensors(tmp_path / "files", tmp_path / "class")
    for targets in configs:  # vLLM looks for the names of the files
        experts = "model.layers.1.block_sparse_moe.experts.3"
        assert all(any(match_name(f"{experts}.w{n}", t) for t in targets) for n in (1, 2, 3))
        assert not any(match_name("model.layers.0.self_attn.q_proj", t) for t in targets)

    module = loaded(mixtral)
    oneshot(module, recipe(kind, FILES), data, tmp_path / "module")
    assert not hasattr(module, "other_names")
    assert_same_tensors(tmp_path / "files", tmp_path / "module")
    found = validate_folder(tmp_path / "files", mixtral, full=True)
    assert (found.problems, found.notes) == ([], [])
    ids = token_batches(3)[0]
    with torch.no_grad():
        assert_close(loaded(tmp_path / "class")(ids).logits, module(ids).logits, rtol=0, atol=0)


@pytest.mark.parametrize("target", [FILES, CLASS])
def test_an_evaluation_finds_the_experts(target: str, mixtral: Path, tmp_path: Path) -> None:
    """It rounds their inputs as the server does, so it needs the scheme of each."""
    chosen = QuantizationModifier(scheme="FP8_DYNAMIC", targets=[target])
    oneshot(mixtral, chosen, None, tmp_path / "q")
    source, _ = open_model(tmp_path / "q")
    schemes = [getattr(m, "quantization_scheme", None) for m in source.model.modules()]
    assert sum(scheme is not None for scheme in schemes) == 2 * 4 * 3


def test_a_tower_is_ignored_by_its_name_in_the_files(tmp_path: Path) -> None:
    """The class of LLaVA calls it model.vision_tower."""
    other_model("llava").save_pretrained(tmp_path / "m")
    assert any(name.startswith("vision_tower.") for name in read(tmp_path / "m"))
    ignore = ["lm_head", "re:vision_tower.*", "re:multi_modal_projector.*"]
    for data in (None, token_batches()):
        scheme = "FP8_DYNAMIC" if data is None else "FP8"
        chosen = QuantizationModifier(scheme=scheme, ignore=ignore)
        for model in (tmp_path / "m", other_model("llava")):
            plan = oneshot(model, chosen, data, dry_run=True).plan
            assert not plan.errors
            assert plan.quantized and not any("vision" in p.name for p in plan.quantized)


def test_targets_for_names() -> None:
    names = [f"a.{i}.x" for i in range(12)]
    (pattern,) = targets_for(names, others=["a.3.y", "a.x"])
    assert all(match_name(name, pattern) for name in names)
    assert not any(match_name(other, pattern) for other in ("a.3.y", "a.x", "a.3.xx", "a.b.x"))
    assert targets_for(names, others=["b.a.3.x"]) == names
    assert targets_for(["a.0.x"], others=[]) == ["a.0.x"]
