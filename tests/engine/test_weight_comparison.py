"""Comparing: each case has the errors of a real run, from weights that are read once."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import in_fp32, samples
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


@torch.no_grad()
def output_errors(model: Path, quantized: Path, data: list[list[int]]) -> dict[str, float]:
    """Return the output error of each Linear, from what flows through transformers' modules."""
    whole, rounded = in_fp32(model), in_fp32(quantized)
    found: dict[str, list[float]] = {}
    for name, module in whole.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":

            def note(_m: Any, args: Any, output: Any, name: str = name) -> None:
                weight = rounded.get_submodule(name).weight
                off = (args[0] @ weight.T - output).double()
                sums = found.setdefault(name, [0.0, 0.0])
                sums[0] += float(off.square().sum())
                sums[1] += float(output.double().square().sum())

            module.register_forward_hook(note)
    for ids in data:
        whole(torch.tensor([ids]))
    return {name: noise / signal for name, (noise, signal) in found.items()}


def test_with_data_errors_are_those_of_outputs(model: Path, tmp_path: Path) -> None:
    data = samples(seed=7)
    found = compare(model, ["W4A16", "NVFP4A16"], ["memoryless_minmax"], data=data)
    assert found.data is not None and found.unseen == []
    for case in found.cases:
        out = tmp_path / case.scheme
        recipe = QuantizationModifier(
            scheme=case.scheme, ignore=["lm_head"], weight_observer="memoryless_minmax"
        )
        oneshot(model, recipe, output_dir=out)
        assert case.errors == pytest.approx(output_errors(model, out, data), rel=2e-3)
    weights = compare(model, ["W4A16"], ["memoryless_minmax"])
    assert weights.cases[0].errors != found.cases[0].errors
    assert (weights.as_dict()["measure"], found.as_dict()["measure"]) == ("weight", "output")


def test_with_data_columns_are_weighted_as_in_a_run(model: Path, tmp_path: Path) -> None:
    """`imatrix_mse` is refused without data; with it, it finds the scales of a run."""
    data = samples(seed=7)
    with pytest.raises(OptionError, match="give it data"):
        compare(model, ["W4A16"], ["imatrix_mse"])
    (case,) = compare(model, ["W4A16"], ["imatrix_mse"], data=data).cases
    recipe = QuantizationModifier(scheme="W4A16", ignore=["lm_head"], weight_observer="imatrix_mse")
    oneshot(model, recipe, data, tmp_path / "q", propagate_error=False)
    found = output_errors(model, tmp_path / "q", data)
    assert case.errors == pytest.approx(found, rel=0.02)  # inputs of the run are in bf16


def test_experts_that_no_token_reaches_are_listed(experts: Path) -> None:
    observers = ["memoryless_minmax"]
    few = compare(experts, ["NVFP4A16"], observers, data=[[5, 6, 7]])
    many = compare(experts, ["NVFP4A16"], observers, data=samples(seed=7))
    assert many.unseen == [] and "model.layers.0.mlp.experts.3.up_proj" in many.energies
    assert few.unseen and all(".experts." in name for name in few.unseen)
    assert set(few.unseen) | set(few.energies) == set(many.energies)
    assert set(few.cases[0].errors) == set(few.energies), "no weight errors among those of outputs"
    with pytest.raises(PlanError, match="no token of the data reaches"):
        compare(experts, ["W8A8"], observers, data=[[5, 6, 7]], keep=lambda n: n in few.unseen)


def test_the_head_has_inputs_too(model: Path) -> None:
    found = compare(model, ["W8A8"], ["optimal"], ignore=[], data=samples(seed=7))
    assert "lm_head" in found.cases[0].errors and found.unseen == []


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
