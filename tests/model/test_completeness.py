"""Damaged or incomplete sources are refused before any work, or where the damage is met."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from families import read, small_model, token_batches
from safetensors.torch import save_file

from steelyard import oneshot
from steelyard.engine import stream as streaming
from steelyard.engine import stream_jobs
from steelyard.errors import CheckpointError, NonFiniteError, PlanError
from steelyard.modifiers import QuantizationModifier

FREE = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])


def saved(folder: Path, **changes: Any) -> dict[str, torch.Tensor]:
    """Save a model with these tensors in place of its own; None leaves one out."""
    small_model("llama", attention_bias=True).save_pretrained(folder)
    tensors: dict[str, Any] = {**read(folder), **changes}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    return kept


def rename(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


# -- NaN and infinity ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("model.norm.weight", float("nan"), r"1 NaN of 64 values, the first at \[5\]"),
        ("model.layers.1.input_layernorm.weight", float("inf"), r"1 infinite of 64 values"),
        ("model.embed_tokens.weight", float("-inf"), r"1 infinite of 8192 .* at \[0, 5\]"),
        ("model.layers.0.self_attn.q_proj.bias", float("nan"), r"1 NaN of 64 values"),
        ("lm_head.weight", float("nan"), r"1 NaN of 8192 values, the first at \[0, 5\]"),
    ],
)
@pytest.mark.parametrize("small", [True, False])
def test_copied_tensors_are_finite(
    name: str, value: float, said: str, small: bool, tmp_path: Path, monkeypatch: Any
) -> None:
    """Whether they are held, or pass a piece at a time as large ones do."""
    if not small:
        monkeypatch.setattr(stream_jobs, "_LEAST", 0)
        monkeypatch.setattr(streaming.Stream, "_read", _not_held)
    small_model("llama", attention_bias=True).save_pretrained(tmp_path / "m")
    tensor = read(tmp_path / "m")[name]
    tensor.view(-1)[5] = value
    saved(tmp_path / "m", **{name: tensor})
    with pytest.raises(NonFiniteError, match=rf"{name} holds {said}"):
        oneshot(tmp_path / "m", FREE, None, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def _not_held(self: Any, job: Any) -> list[torch.Tensor]:
    return [self.view.read(name) for name in job.names] if job.modules else []


def test_with_data_too(tmp_path: Path) -> None:
    """A row of the embedding that no token reads."""
    small_model("llama").save_pretrained(tmp_path / "m")
    tensor = read(tmp_path / "m")["model.embed_tokens.weight"]
    tensor[0, 5] = float("nan")  # token 0 is padding
    tensors = {**read(tmp_path / "m"), "model.embed_tokens.weight": tensor}
    save_file(tensors, tmp_path / "m" / "model.safetensors", metadata={"format": "pt"})
    scheme = QuantizationModifier(scheme="FP8", ignore=["lm_head"])
    with pytest.raises(NonFiniteError, match=r"embed_tokens\.weight holds 1 NaN"):
        oneshot(tmp_path / "m", scheme, token_batches(), tmp_path / "q")


def test_a_masked_bias_of_one_number_may_be_infinite(tmp_path: Path) -> None:
    mask = torch.tensor(float("-inf"), dtype=torch.bfloat16)
    saved(tmp_path / "m", **{"model.layers.0.self_attn.masked_bias": mask})
    oneshot(tmp_path / "m", FREE, None, tmp_path / "q")
    assert float(read(tmp_path / "q")["model.layers.0.self_attn.masked_bias"]) == float("-inf")


# -- what is missing ----------------------------------------------------------------------------


def test_shards_without_an_index(tmp_path: Path) -> None:
    tensors = saved(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").unlink()
    names = sorted(tensors)
    parts = [{n: tensors[n] for n in names[i::3]} for i in range(3)]
    for i in (0, 2):
        save_file(parts[i], tmp_path / "m" / f"model-{i + 1:05d}-of-00003.safetensors")
    with pytest.raises(CheckpointError, match=r"2 of 3 files.*model-00002-of-00003\.safetensors"):
        oneshot(tmp_path / "m", FREE, None, tmp_path / "q")
    save_file(parts[1], tmp_path / "m" / "model-00002-of-00003.safetensors")
    oneshot(tmp_path / "m", FREE, None, tmp_path / "q")


@pytest.mark.parametrize("kind", ["llama", "nobody"])
def test_fewer_layers_than_the_config_states(kind: str, tmp_path: Path) -> None:
    saved(tmp_path / "m")
    rename(tmp_path / "m", num_hidden_layers=4, model_type=kind)
    said = {
        "llama": r"do not hold model\.layers\.3\.\S+ and \d+ more.*number of layers",
        "nobody": r"num_hidden_layers 4, but the files hold 3 \(model\.layers\.0 to 2\)",
    }
    with pytest.raises(PlanError, match=said[kind]):
        oneshot(tmp_path / "m", FREE, None, tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_one_tensor_of_a_layer(tmp_path: Path) -> None:
    name = "model.layers.1.post_attention_layernorm.weight"
    saved(tmp_path / "m", **{name: None})
    with pytest.raises(PlanError, match=f"do not hold {name}, which other layers have"):
        oneshot(tmp_path / "m", FREE, None, tmp_path / "q")


def test_one_tensor_that_no_layer_has_is_a_warning(tmp_path: Path) -> None:
    """The class initializes it randomly, which may be meant: a base model without its head."""
    saved(tmp_path / "m", **{"lm_head.weight": None})
    plan = oneshot(tmp_path / "m", FREE, None, dry_run=True).plan
    assert any("do not hold lm_head.weight" in w for w in plan.warnings)
    assert not plan.errors


@pytest.mark.parametrize("file", ["adapter_config.json", "adapter_model.safetensors"])
def test_an_adapter_beside_the_model(file: str, tmp_path: Path) -> None:
    saved(tmp_path / "m")
    if file.endswith("json"):
        (tmp_path / "m" / file).write_text("{}")
    else:
        save_file({"base_model.lora_A.weight": torch.zeros(2, 2)}, tmp_path / "m" / file)
    with pytest.raises(PlanError, match=rf"adapter \({file}\).*merge"):
        oneshot(tmp_path / "m", FREE, None, tmp_path / "q")
