"""Modules that compressed-tensors or accelerate offloaded are quantized like those in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
from compressed_tensors.offload import offload_module
from families import assert_same_tensors, small_model, token_batches
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from steelyard import oneshot
from steelyard.checkpoint.validator import validate_checkpoint
from steelyard.modifiers import GPTQModifier, QuantizationModifier

ARGS = {"num_bits": 4, "strategy": "group", "group_size": 32}
GROUPS: Any = {"g": {"targets": ["Linear"], "weights": ARGS}}


def offloaded(folder: Path) -> Any:
    model = small_model("llama")
    folder.mkdir()
    for module in list(model.modules()):
        if module._parameters:
            offload_module(module, "cpu", "disk", offload_dir=str(folder))
    return model


def test_disk_and_memory_give_the_same_checkpoint(tmp_path: Path) -> None:
    recipe = QuantizationModifier(config_groups=GROUPS, ignore=["lm_head"])
    for name, model in (("memory", small_model("llama")), ("disk", offloaded(tmp_path / "off"))):
        oneshot(model, recipe)
        model.save_pretrained(tmp_path / name)
    assert_same_tensors(tmp_path / "memory", tmp_path / "disk")


def test_gptq_of_an_offloaded_model(tmp_path: Path) -> None:
    recipe = GPTQModifier(config_groups=GROUPS, ignore=["lm_head"])
    data = [batch[0].tolist() for batch in token_batches()]
    models = {"memory": small_model("llama"), "disk": offloaded(tmp_path / "off")}
    for name, model in models.items():
        oneshot(model, recipe, data)
        model.save_pretrained(tmp_path / name)
    assert_same_tensors(tmp_path / "memory", tmp_path / "disk")
    assert validate_checkpoint(tmp_path / "disk") == []
    ids = torch.tensor([[5, 6, 7]])
    assert_close(models["disk"](ids).logits, models["memory"](ids).logits)


def loaded(folder: Path, how: str, work: Path) -> Any:
    """Load a model as a user does with accelerate."""
    if how == "device_map":
        places = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu"}
        places |= {"model.layers": "disk", "lm_head": "disk"}
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype="auto", device_map=places, offload_folder=work
        )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    if how == "cpu_offload":
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    return model


@pytest.mark.parametrize("how", ["device_map", "cpu_offload"])
def test_what_accelerate_offloads_gives_the_bytes_of_a_module_in_memory(
    how: str, tmp_path: Path
) -> None:
    small_model("llama").save_pretrained(tmp_path / "model")
    data = [batch[0].tolist() for batch in token_batches()]
    logits = []
    for each in ("memory", how):
        model = loaded(tmp_path / "model", each, tmp_path / "work")
        assert any(p.device.type == "meta" for p in model.parameters()) == (each == how)
        oneshot(model, GPTQModifier(config_groups=GROUPS, ignore=["lm_head"]), data)
        model.save_pretrained(tmp_path / each)
        logits.append(model(torch.tensor([[5, 6, 7]])).logits)
    assert_same_tensors(tmp_path / "memory", tmp_path / how)
    assert_close(*logits)
