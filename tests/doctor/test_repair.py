"""`--repair` writes the config and the index that the run wrote, and changes no weight."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import damages as d
import pytest

pytest.importorskip("transformers")

from families import small_model

from steelyard import oneshot
from steelyard.doctor import examine, repair_folder
from steelyard.errors import CheckpointError, OutputError
from steelyard.modifiers import QuantizationModifier

SCHEMES = ("W4A16", "W4A16_ASYM", "FP8_DYNAMIC", "NVFP4A16")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repair")
    model = small_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    model.save_pretrained(folder / "base")
    for scheme in SCHEMES:
        recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"])
        oneshot(str(folder / "base"), recipe, output_dir=folder / scheme)
    return folder


def settings(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return content


def damaged(made: Path, scheme: str, damage: d.Damage, tmp_path: Path) -> Path:
    folder = Path(shutil.copytree(made / scheme, tmp_path / "bad"))
    damage(folder)
    assert examine(folder).findings.problems
    return folder


CONFIGS = {
    "group_size": ("W4A16", d.weights(group_size=32)),
    "num_bits": ("W4A16", d.weights(num_bits=8)),
    "symmetric": ("W4A16_ASYM", d.weights(symmetric=True)),
    "strategy": ("FP8_DYNAMIC", d.weights(strategy="tensor")),
    "method": ("W4A16", d.quantization(lambda c: c.pop("quant_method"))),
    "status": ("NVFP4A16", d.quantization(lambda c: c.update(quantization_status="frozen"))),
    "head": ("W4A16", d.quantization(lambda c: c.update(ignore=[]))),
    "ignored": ("FP8_DYNAMIC", d.quantization(lambda c: c["ignore"].append(d.Q))),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_config(made: Path, tmp_path: Path, name: str) -> None:
    scheme, damage = CONFIGS[name]
    bad = damaged(made, scheme, damage, tmp_path)
    changes = repair_folder(bad, tmp_path / "good")
    assert any(name.split("_")[0] in change or "ignore" in change for change in changes)
    assert examine(tmp_path / "good", made / "base").findings.found == []
    assert settings(tmp_path / "good") == settings(made / scheme)
    assert not (tmp_path / "good" / "provenance.json").exists()
    weights = [folder / "model.safetensors" for folder in (bad, tmp_path / "good")]
    assert weights[0].samefile(weights[1])


@pytest.mark.parametrize(
    "damage",
    [
        d.index(d.wrong_shard),
        d.index(lambda m: m.pop(next(iter(m)))),
        d.sharded(lambda folder: (folder / d.INDEX).write_text("{")),
        d.sharded(d.swap_shards),
    ],
)
def test_index(made: Path, tmp_path: Path, damage: d.Damage) -> None:
    bad = damaged(made, "W4A16", damage, tmp_path)
    assert any(d.INDEX in change for change in repair_folder(bad, tmp_path / "good"))
    assert examine(tmp_path / "good", made / "base").findings.found == []


def test_settings_of_the_base(made: Path, tmp_path: Path) -> None:
    bad = damaged(made, "W4A16", d.setting("rms_norm_eps", 1.0), tmp_path)
    changes = repair_folder(bad, tmp_path / "good", made / "base")
    assert any("rms_norm_eps" in change for change in changes)
    assert settings(tmp_path / "good") == settings(made / "W4A16")


def test_what_cannot_be_repaired(made: Path, tmp_path: Path) -> None:
    """Nothing is left behind; a folder in use is not touched."""
    bad = damaged(made, "W4A16", d.cut("model.safetensors"), tmp_path)
    with pytest.raises(CheckpointError, match="the download is incomplete"):
        repair_folder(bad, tmp_path / "good")
    assert not (tmp_path / "good").exists()
    with pytest.raises(OutputError, match="not empty"):
        repair_folder(made / "W4A16", made / "FP8_DYNAMIC")
