"""Observers and schemes of a user's own file are accepted wherever built-in ones are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import Command
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES
from pages import own_registrations

from steelyard.observers import Observer

PLUGIN = """
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard.observers import Observer, StaticMinMaxObserver


@Observer.register("own_range")
class OwnRange(StaticMinMaxObserver):
    \"\"\"The range of all values.\"\"\"


PRESET_SCHEMES["W8_OWN"] = PRESET_SCHEMES["W8A16"]
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setitem(PRESET_SCHEMES, "W8_OWN", PRESET_SCHEMES["W8A16"])
    monkeypatch.delitem(PRESET_SCHEMES, "W8_OWN")  # undone, so the plug-in's entry is gone
    (tmp_path / "own.py").write_text(PLUGIN)
    with own_registrations():
        yield tmp_path / "own.py"


def test_lists(plugin: Path, steelyard: Command) -> None:
    listed = steelyard("ls", "--plugin", plugin, "--json").document
    assert "own_range" in listed["observers"] and "W8_OWN" in listed["schemes"]


def test_comparison(plugin: Path, model: Path, steelyard: Command) -> None:
    names = ("--observers", "own_range,static_minmax", "--schemes", "W8_OWN", "--layers", "1")
    cases = steelyard("compare", model, *names, "--plugin", plugin, "--json").document["cases"]
    assert [case["observer"] for case in cases] == ["own_range", "static_minmax"]
    assert cases[0]["error"] == cases[1]["error"]


def test_from_statistics_to_a_checkpoint(
    plugin: Path, model: Path, workplace: Path, tmp_path: Path, steelyard: Command
) -> None:
    """Each command registers the observer anew, as in a process of its own."""
    recipe = """
QuantizationModifier:
  ignore: [lm_head]
  config_groups:
    all:
      targets: [Linear]
      weights: {num_bits: 8, strategy: channel, observer: own_range}
      input_activations: {num_bits: 8, strategy: tensor, dynamic: false, observer: own_range}
"""
    (tmp_path / "own.yaml").write_text(recipe)
    given = ("--recipe", tmp_path / "own.yaml", "--max-seq-length", "16", "--samples", "4")
    parts = []
    for part in ("calibration", "held-out"):
        parts.append(tmp_path / f"{part}.safetensors")
        data = ("--data", workplace / f"{part}.txt")
        with own_registrations():
            answer = steelyard("observe", model, *given, *data, "-o", parts[-1], "--plugin", plugin)
        assert answer.code == 0, answer.err
    merged = ("merge", *parts, "-o", tmp_path / "all.safetensors")
    without = steelyard(*merged)
    assert without.code != 0 and "own_range" in without.err
    with own_registrations():
        assert steelyard(*merged, "--plugin", plugin).code == 0
    statistics = ("--statistics", tmp_path / "all.safetensors", *given[:2])
    with own_registrations():
        answer = steelyard("quantize", model, "-o", tmp_path / "q", *statistics, "--plugin", plugin)
    assert answer.code == 0, answer.err
    with own_registrations():
        checked = steelyard("validate", tmp_path / "q", "--source", model, "--plugin", plugin)
    assert checked.code == 0, checked.out
    assert "own_range" not in Observer.registry
