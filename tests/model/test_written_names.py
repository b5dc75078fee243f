"""Names of tensors: those of the files, whether a folder or a loaded module is given."""

from __future__ import annotations

from pathlib import Path

import pytest
from families import read
from multimodal import MODELS, multimodal_model
from safetensors.torch import save_file

from steelyard.model.source import Source

RENAMED = ["llava", "mistral3", "mllama", "internvl", "qwen2_vl", "qwen2_5_vl", "qwen2_audio"]


@pytest.mark.parametrize("family", MODELS)
def test_a_module_without_files_has_the_names_of_save_pretrained(
    family: str, tmp_path: Path
) -> None:
    model = multimodal_model(family)
    model.save_pretrained(tmp_path)
    stored = set(read(tmp_path))
    tied = model.all_tied_weights_keys
    names = {new for own, new in Source.open(model).keys.items() if own not in tied}
    assert names <= stored
    assert all(".experts." in name for name in stored - names), "only stacked experts are joined"


@pytest.mark.parametrize("family", RENAMED)
def test_a_loaded_module_and_its_folder_have_the_same_names(family: str, tmp_path: Path) -> None:
    made = multimodal_model(family)
    made.save_pretrained(tmp_path)
    loaded = type(made).from_pretrained(tmp_path)
    folder, module = Source.open(tmp_path), Source.open(loaded)
    assert any(own != name for own, name in folder.keys.items())
    tied = loaded.all_tied_weights_keys
    assert {k: v for k, v in module.keys.items() if k not in tied} == {
        k: v for k, v in folder.keys.items() if k not in tied
    }


def test_files_of_older_names_keep_them(tmp_path: Path) -> None:
    """transformers loads `model.` before every name, and would save without it."""
    made = multimodal_model("bert")
    made.save_pretrained(tmp_path)
    tensors = {
        name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("Norm.bias", "Norm.beta"): t
        for name, t in read(tmp_path).items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    source = Source.open(type(made).from_pretrained(tmp_path))
    written = {v for k, v in source.keys.items() if k not in made.all_tied_weights_keys}
    assert written == set(tensors) and any(name.endswith("gamma") for name in written)
