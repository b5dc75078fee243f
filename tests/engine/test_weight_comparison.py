"""Comparing: each case has the errors of a real run, from weights that are read once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model

from steelyard import oneshot
from steelyard.checkpoint import CheckpointView
from steelyard.engine.compared_weights import by_depth, layer_of, snr
from steelyard.engine.weight_comparison import compare
from steelyard.errors import OptionError, PlanError
from steelyard.modifiers import QuantizationModifier

OBSERVERS = ["memoryless_minmax", "optimal"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "m"
    small_model("llama", hidden_size=128, intermediate_size=256).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare") / "moe"
    small_model("qwen3_moe").save_pretrained(folder)
    return folder


def real_errors(model: Path, scheme: str, observer: str, out: Path) -> dict[str, float | None]:
    recipe = QuantizationModifier(scheme=scheme, ignore=["lm_head"], weight_observer=observer)
    result = oneshot(model, recipe, output_dir=out)
    return {name: module.error for name, module in result.modules.items()}


def test_errors_are_those_of_a_run(model: Path, tmp_path: Path) -> None:
    schemes = ["W4A16", "NVFP4A16", "FP8_DYNAMIC", "MXFP4A16"]
    found = compare(model, schemes, OBSERVERS)
    assert [(c.scheme, c.observer) for c in found.cases] == [
        (scheme, observer) for scheme in schemes for observer in OBSERVERS
    ]
    for i, case in enumerate(found.cases):
        assert case.errors == real_errors(model, case.scheme, case.observer, tmp_path / str(i))


def test_experts(experts: Path, tmp_path: Path) -> None:
    (case,) = compare(experts, ["NVFP4A16"], ["optimal"]).cases
    assert case.errors == real_errors(experts, "NVFP4A16", "optimal", tmp_path / "q")
    assert "model.layers.0.mlp.experts.3.up_proj" in case.errors


def test_static_schemes_need_no_data_here(model: Path) -> None:
    static, dynamic = compare(model, ["FP8", "FP8_DYNAMIC"], ["memoryless_minmax"]).cases
    assert static.errors.keys() == dynamic.errors.keys()
    assert static.bits_per_weight is not None and dynamic.bits_per_weight is not None
    assert 8 < static.bits_per_weight < dynamic.bits_per_weight < 8.5


def test_every_weight_is_read_once(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, names = CheckpointView.read, []

    def counting(self: CheckpointView, name: str) -> torch.Tensor:
        names.append(name)
        return read(self, name)

    monkeypatch.setattr(CheckpointView, "read", counting)
    found = compare(model, ["W4A16", "NVFP4A16", "FP8"], OBSERVERS)
    assert sorted(names) == sorted(f"{name}.weight" for name in found.energies)
    assert len(names) == 21


def test_filtered_weight_keeps_the_scale_that_it_shares(model: Path) -> None:
    whole = compare(model, ["NVFP4A16"], OBSERVERS)
    part = compare(model, ["NVFP4A16"], OBSERVERS, keep=lambda name: name.endswith("k_proj"))
    for all_of_it, case in zip(whole.cases, part.cases, strict=True):
        assert len(case.errors) == 3
        assert case.errors == {name: all_of_it.errors[name] for name in case.errors}
    assert part.energies.keys() == part.cases[0].errors.keys()


def test_layers_are_spread_and_summed(model: Path) -> None:
    found = compare(model, ["W4A16"], ["optimal"], layers=2)
    assert list(found.layers()) == ["model.layers.0", "model.layers.2"]
    (case,) = found.cases
    names = found.layers()["model.layers.2"]
    weights = {n: CheckpointView(model).read(f"{n}.weight").double() for n in names}
    energy = {n: float(w.square().sum()) for n, w in weights.items()}
    noise = sum(case.errors[n] * energy[n] for n in names)
    assert found.error(case, names) == pytest.approx(noise / sum(energy.values()), rel=1e-5)
    content: Any = found.as_dict()["cases"][0]
    assert content["snr_db"] == pytest.approx(-10 * math.log10(content["error"]))
    assert content["layers"].keys() == found.layers().keys()


def test_layers_are_spread_by_their_numbers(tmp_path: Path) -> None:
    """Files hold names in the order of text: 0, 1, 10, 11, 12, 2, ..."""
    small_model("llama", num_hidden_layers=13).save_pretrained(tmp_path)
    four = compare(tmp_path, ["FP8_DYNAMIC"], ["memoryless_minmax"], layers=4)
    assert list(four.layers()) == [f"model.layers.{i}" for i in (0, 4, 8, 12)]
    every = compare(tmp_path, ["FP8_DYNAMIC"], ["memoryless_minmax"])
    assert list(every.layers()) == [f"model.layers.{i}" for i in range(13)]


def test_scheme_that_does_not_fit_is_set_aside(experts: Path) -> None:
    found = compare(experts, ["W4A16", "NVFP4A16"], ["optimal"])
    refused, fitting = found.cases
    assert refused.errors == {} and "columns cannot be cut" in refused.refused[0]
    assert fitting.refused == [] and fitting.errors
    with pytest.raises(PlanError, match="no scheme fits the model:\n  - W4A16: "):
        compare(experts, ["W4A16"], ["optimal"])


def test_refused(model: Path) -> None:
    with pytest.raises(OptionError, match="imatrix_mse weights columns by calibration data"):
        compare(model, ["W4A16"], ["imatrix_mse"])
    with pytest.raises(PlanError, match="is left to compare"):
        compare(model, ["W4A16"], ["optimal"], keep=lambda name: False)


def test_small_functions() -> None:
    assert snr(0.01) == 20.0 and snr(0.0) is None and snr(None) is None
    assert layer_of("model.layers.3.mlp.experts.7.up_proj") == "model.layers.3"
    two = ["vision.1", "vision.0", "text.10", "head", "text.9"]
    assert by_depth(two) == ["vision.0", "vision.1", "text.9", "text.10", "head"]
    assert layer_of("lm_head") is None
