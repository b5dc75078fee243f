"""Checkpoints in the layout of llm-compressor give no finding, with and without the base model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

from damages import flip, swap
from families import small_model
from foreign_checkpoint import write_foreign

from steelyard.doctor import examine

LAYOUTS: dict[str, dict[str, Any]] = {
    "W4A16": {},
    "W4A16_ASYM": {},
    "W8A8": {},
    "FP8_DYNAMIC": {},
    "NVFP4A16": {},
    "MXFP4A16": {},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("foreign") / "base"
    model = small_model("llama", hidden_size=128, intermediate_size=256, num_hidden_layers=2)
    model.float().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("preset", LAYOUTS)
def test_no_finding(preset: str, base: Path, tmp_path: Path) -> None:
    folder = write_foreign(base, tmp_path / "q", preset, **LAYOUTS[preset])
    for against in (None, base):
        found = examine(folder, against).findings
        assert found.found == []
        assert found.modules == 14


def test_unshared_scales_of_fp8_are_a_note(base: Path, tmp_path: Path) -> None:
    """vLLM quantizes such a layer again."""
    folder = write_foreign(base, tmp_path / "q", "FP8_DYNAMIC", strategy="tensor")
    found = examine(folder, base).findings
    assert found.found == []
    assert any("quantizes 4 fused layers again" in note for note in found.notes)


def test_damage_to_a_cast_copy(base: Path, tmp_path: Path) -> None:
    """Values of the base are compared in the type that the other tool loaded it in."""
    folder = write_foreign(base, tmp_path / "q", "W8A8")
    flip("weight", 0, 3, "model.norm")(folder)
    assert [f.check for f in examine(folder, base).findings.found] == ["unquantized"]
    other = write_foreign(base, tmp_path / "r", "W8A8")
    swap("model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")(other)
    assert {f.check for f in examine(other, base).findings.found} == {"weight"}
