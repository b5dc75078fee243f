"""Statistics in files: saved in parts, joined, and used as if one run had seen all the data."""

from __future__ import annotations

import errno
import itertools
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model
from forked import start_forked
from interruption import Stop, stop_at_mark
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import distributed as dist
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.checkpoint import CheckpointWriter
from steelyard.engine.statistics import merge_statistics
from steelyard.errors import (
    CalibrationError,
    CheckpointError,
    DataError,
    PlanError,
    StatisticsError,
)
from steelyard.modifiers import GPTQModifier, IMatrixGatherer, QuantizationModifier
from steelyard.names import observer_modules
from steelyard.observers import Observer
from steelyard.observers.importance_base import ImportanceObserver

NAME = "model.layers.1.mlp.down_proj"
pytestmark = pytest.mark.filterwarnings(  # parts are small here
    "ignore:calibrating on .* tokens only:steelyard.errors.CalibrationWarning"
)


PLAIN = "memoryless_minmax"  # which gathers nothing from data, unlike the default


def static(observer: str, bits: int = 8, **scheme: Any) -> QuantizationModifier:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": "channel", "observer": PLAIN},
        "input_activations": {"num_bits": bits, "strategy": "tensor", "observer": observer},
    }
    groups = {"group_0": {**group, **scheme}}
    return QuantizationModifier(config_groups=groups, ignore=["lm_head"])


def weighed(observer: str) -> list[Any]:
    args = {"num_bits": 3, "strategy": "group", "group_size": 32, "observer": observer}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    return [IMatrixGatherer(), QuantizationModifier(config_groups=groups, ignore=["lm_head"])]


CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "symmetric": True}
OUTPUT = {"num_bits": 8, "strategy": "tensor", "observer": "minmax"}
RECIPES: dict[str, Any] = {
    "minmax": static("minmax"),
    "static_minmax": static("static_minmax"),
    "mse": static("mse"),
    "memoryless_minmax": static("memoryless_minmax"),
    "output": static("static_minmax", output_activations=OUTPUT),
    "kv_cache": QuantizationModifier(
        scheme="FP8_DYNAMIC", ignore=["lm_head"], kv_cache_scheme=CACHE
    ),
    "nvfp4": QuantizationModifier(scheme="NVFP4", ignore=["lm_head"]),
    "nvfp4_average": QuantizationModifier(
        scheme="NVFP4", ignore=["lm_head"], input_observer="minmax"
    ),
    "imatrix_mse": weighed("imatrix_mse"),
    "optimal": weighed("optimal"),
    "nvfp4_expanded_imatrix": [
        IMatrixGatherer(),
        QuantizationModifier(
            scheme="NVFP4A16", ignore=["lm_head"], weight_observer="nvfp4_expanded_imatrix"
        ),
    ],
    "head": QuantizationModifier(scheme="FP8"),
}
for _name in (name for group in observer_modules().values() for name in group):
    _class = Observer.get_value_from_registry(_name)
    if _class._act_sync_dict and _name not in RECIPES:  # one that is new
        RECIPES[_name] = (weighed if issubclass(_class, ImportanceObserver) else static)(_name)


def samples(count: int = 6, seed: int = 0) -> list[list[int]]:
    """Of different lengths; later ones reach further, so that their order is seen."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(3, 16 * (i % 8 + 1), (9 + i % 3,), generator=generator).tolist()
        for i in range(count)
    ]


def observe(source: Any, recipe: Any, data: Any, path: Path, **options: Any) -> Any:
    return oneshot(
        source, recipe, data, save_statistics=path, shuffle_calibration_samples=False, **options
    )


def in_parts(source: Path, recipe: Any, cuts: list[int], folder: Path) -> list[Path]:
    data = samples()
    files = []
    for start, stop in itertools.pairwise([0, *cuts, len(data)]):
        files.append(folder / f"{start}.safetensors")
        observe(source, recipe, data[start:stop], files[-1])
    return files


def contents(folder: Path) -> dict[str, bytes]:
    """Return all that is served, and not what tells of the run: the report, and its record."""
    files = [f for f in folder.rglob("*") if f.is_file() and not f.name.startswith("report.")]
    found = {str(file.relative_to(folder)): file.read_bytes() for file in files}
    statement = json.loads(found["provenance.json"])  # of which the digests must agree
    found["provenance.json"] = json.dumps(statement["subject"]).encode()
    return found


def content_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["steelyard"]))


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "s.safetensors"
    observe(source, RECIPES["minmax"], samples(), path)
    return path


# -- parts are the whole ------------------------------------------------------------------------


@pytest.mark.parametrize("cuts", [[2], [1, 4]], ids=["two", "three"])
@pytest.mark.parametrize("kind", RECIPES)
def test_parts_equal_one_run(kind: str, cuts: list[int], source: Path, tmp_path: Path) -> None:
    recipe = RECIPES[kind]
    whole = tmp_path / "whole.safetensors"
    one = observe(source, recipe, samples(), whole, output_dir=tmp_path / "one")
    files = in_parts(source, recipe, cuts, tmp_path)
    merge_statistics(files, tmp_path / "all.safetensors")
    assert_close(load_file(tmp_path / "all.safetensors"), load_file(whole), rtol=0, atol=0)
    result = oneshot(
        source, recipe, statistics=tmp_path / "all.safetensors", output_dir=tmp_path / "two"
    )
    assert contents(tmp_path / "two") == contents(tmp_path / "one")
    assert result.modules == without_output_errors(one.modules)
    # what would make all of the above true for nothing
    oneshot(source, recipe, statistics=files[0], output_dir=tmp_path / "part")
    assert contents(tmp_path / "part") != contents(tmp_path / "one")


def without_output_errors(modules: dict[str, Any]) -> dict[str, Any]:
    """Results as a run from statistics has them: without data, it has no outputs to compare."""
    known = ("output_error", "block_error")
    assert any("output_error" in each.details for each in modules.values())
    return {
        name: replace(each, details={k: v for k, v in each.details.items() if k not in known})
        for name, each in modules.items()
    }


@pytest.mark.parametrize("kind", ["static_minmax", "nvfp4", "imatrix_mse", "optimal"])
def test_the_order_of_files_does_not_matter(kind: str, source: Path, tmp_path: Path) -> None:
    files = in_parts(source, RECIPES[kind], [1, 4], tmp_path)
    found = []
    for i, order in enumerate(itertools.permutations(files)):
        merge_statistics(order, tmp_path / f"all{i}")
        found.append(load_file(tmp_path / f"all{i}"))
    for other in found[1:]:
        assert_close(other, found[0], rtol=0, atol=0)


def test_the_order_of_files_is_that_of_a_moving_average(source: Path, tmp_path: Path) -> None:
    files = in_parts(source, RECIPES["minmax"], [2], tmp_path)
    merge_statistics(files, tmp_path / "ab")
    merge_statistics(files[::-1], tmp_path / "ba")
    name = f"{NAME}.input.max_vals"
    assert not torch.equal(load_file(tmp_path / "ab")[name], load_file(tmp_path / "ba")[name])


@pytest.mark.parametrize("kind", ["minmax", "optimal"])
def test_merging_in_steps_is_merging_at_once(kind: str, source: Path, tmp_path: Path) -> None:
    a, b, c = in_parts(source, RECIPES[kind], [1, 4], tmp_path)
    merge_statistics([a, b, c], tmp_path / "once")
    merge_statistics([a, b], tmp_path / "ab")
    merge_statistics([tmp_path / "ab", c], tmp_path / "steps")
    assert (tmp_path / "steps").read_bytes() == (tmp_path / "once").read_bytes()
    merge_statistics([a], tmp_path / "alone")
    assert (tmp_path / "alone").read_bytes() == a.read_bytes()


def test_saving_changes_nothing(source: Path, tmp_path: Path) -> None:
    recipe = RECIPES["optimal"]
    oneshot(source, recipe, samples(), tmp_path / "plain", shuffle_calibration_samples=False)
    observe(source, recipe, samples(), tmp_path / "s", output_dir=tmp_path / "saving")
    assert contents(tmp_path / "saving") == contents(tmp_path / "plain")
    observe(source, recipe, samples(), tmp_path / "only")
    assert (tmp_path / "only").read_bytes() == (tmp_path / "s").read_bytes()


# -- observing ----------------------------------------------------------------------------------


def test_observing_only_leaves_one_file_and_searches_no_weight(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from steelyard.observers.calibration import Calibration

    monkeypatch.setattr(Calibration, "finish", None)  # would search the weights
    result = observe(source, RECIPES["imatrix_mse"], samples(), tmp_path / "s")
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    assert result.output_dir is None
    tokens = {module.tokens for module in result.modules.values()}
    assert len(result.modules) == 21 and tokens == {0}  # which are of activations
    result = observe(source, RECIPES["minmax"], samples(), tmp_path / "s")
    tokens = {module.tokens for module in result.modules.values()}
    assert tokens == {sum(map(len, samples()))}


def test_what_the_file_says(source: Path, saved: Path) -> None:
    content = content_of(saved)
    assert (content["version"], content["samples"]) == (1, 6)
    assert content["tokens"] == sum(map(len, samples()))
    assert content["model"]["name"] == "m"
    assert "QuantizationModifier" in content["recipe"] and "minmax" in content["recipe"]
    assert len(content["observers"]) == 21
    assert len(load_file(saved)[f"{NAME}.input.max_vals_history"]) == 6


def test_importance_that_a_gatherer_saves_is_the_same(source: Path, tmp_path: Path) -> None:
    """While only observing, and from the file."""
    for i, data in enumerate((samples(), None)):
        recipe = weighed("optimal")
        recipe[0] = IMatrixGatherer(save_to=str(tmp_path / f"importance{i}"))
        if data is not None:
            observe(source, recipe, data, tmp_path / "s")
        else:
            oneshot(source, recipe, statistics=tmp_path / "s", output_dir=tmp_path / "q")
    first, second = (load_file(tmp_path / f"importance{i}") for i in range(2))
    assert len(first) == 42
    assert_close(second, first, rtol=0, atol=0)


@pytest.mark.parametrize("pipeline", ["basic", "sequential"])
def test_a_loaded_module(pipeline: str, source: Path, saved: Path, tmp_path: Path) -> None:
    """It is quantized in place as ever; its file fits the folder and the other way round."""
    from transformers import AutoModelForCausalLM

    recipe = RECIPES["minmax"]
    oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "folder")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    observe(model, recipe, samples(), tmp_path / "s", pipeline=pipeline)
    assert hasattr(model.model.layers[1].mlp.down_proj, "input_scale")
    assert_close(load_file(tmp_path / "s"), load_file(saved), rtol=0, atol=0)
    oneshot(source, recipe, statistics=tmp_path / "s", output_dir=tmp_path / "q")
    assert contents(tmp_path / "q") == contents(tmp_path / "folder")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    oneshot(model, recipe, statistics=saved, pipeline=pipeline)
    stored = {k: v for k, v in model.state_dict().items() if k.endswith("input_scale")}
    read = load_file(tmp_path / "q" / "model.safetensors")
    assert stored and all(torch.equal(value, read[name]) for name, value in stored.items())


def test_weights_may_be_quantized_otherwise(source: Path, saved: Path, tmp_path: Path) -> None:
    """What data has shown does not depend on how weights are stored."""
    weights = {"num_bits": 4, "strategy": "group", "group_size": 32, "observer": PLAIN}
    recipe = static("minmax", weights=weights)
    oneshot(source, recipe, samples(), tmp_path / "a", shuffle_calibration_samples=False)
    oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "b")
    assert contents(tmp_path / "b") == contents(tmp_path / "a")


def test_statistics_that_are_not_asked_for_are_told(
    source: Path, saved: Path, tmp_path: Path
) -> None:
    recipe = static("minmax").model_copy(deep=True)
    recipe = QuantizationModifier(
        config_groups=recipe.config_groups, ignore=["lm_head", "re:.*down_proj"]
    )
    result = oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "q")
    told = "has 3 statistics that the recipe does not ask for, such as input of model.layers.0"
    assert any(told in note for note in result.notes)


# -- experts that a part does not reach ---------------------------------------------------------


def mute(source: Any, name: str) -> Any:
    """Return a model in which no token reaches a module."""
    module = source.get_submodule(name)
    parent = source.get_submodule(name.rpartition(".")[0])
    parent.forward = lambda x: x
    return module


def test_modules_that_no_part_reached(tmp_path: Path) -> None:
    recipe = QuantizationModifier(
        config_groups=RECIPES["minmax"].config_groups, ignore=["lm_head", "re:.*self_attn.*"]
    )
    model = small_model("llama")
    mute(model, NAME)
    observe(model, recipe, samples(), tmp_path / "s", uncalibrated="weights-only")
    observers = {(o[0], o[1]): o for o in content_of(tmp_path / "s")["observers"]}
    assert observers[NAME, "input"][3] == 0  # it was there, and saw nothing
    with pytest.raises(CalibrationError, match=r"layers\.1\.mlp\.down_proj"):
        oneshot(small_model("llama"), recipe, statistics=tmp_path / "s")
    result = oneshot(
        small_model("llama"), recipe, statistics=tmp_path / "s", uncalibrated="weights-only"
    )
    assert not hasattr(result.model.get_submodule(NAME), "input_scale")
    assert hasattr(result.model.get_submodule(NAME), "weight_scale")
    # another part may reach it
    observe(small_model("llama"), recipe, samples(seed=1), tmp_path / "t")
    merge_statistics([tmp_path / "s", tmp_path / "t"], tmp_path / "all")
    result = oneshot(small_model("llama"), recipe, statistics=tmp_path / "all")
    assert hasattr(result.model.get_submodule(NAME), "input_scale")


# -- a resumed run --------------------------------------------------------------------------------


@pytest.mark.parametrize("mark", [1, 2, 3, 4])
def test_a_killed_run_still_saves_everything(
    mark: int, source: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    recipe, out = RECIPES["minmax"], tmp_path / "q"
    with monkeypatch.context() as patch:
        stop_at_mark(patch, mark)
        with pytest.raises(Stop):
            observe(source, recipe, samples(), tmp_path / "s", output_dir=out)
    with pytest.raises(CheckpointError, match="save_statistics"):
        oneshot(source, recipe, samples(), out, shuffle_calibration_samples=False)
    result = observe(source, recipe, samples(), tmp_path / "s", output_dir=out)
    assert any("resumed after" in note for note in result.notes)
    assert (tmp_path / "s").read_bytes() == saved.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["q", "s"]
    assert not list(out.glob("statistics*"))


def test_a_killed_run_from_statistics(
    source: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CheckpointWriter, "mark_seconds", 0.0)
    recipe = RECIPES["minmax"]
    oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "whole")
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 2)
        with pytest.raises(Stop):
            oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "q")
    other = tmp_path / "other"
    observe(source, recipe, samples(seed=1), other)
    with pytest.raises(CheckpointError, match="statistics"):
        oneshot(source, recipe, statistics=other, output_dir=tmp_path / "q")
    oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "q")
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")


# -- ranks --------------------------------------------------------------------------------------


def rank_of_two(rank: int, source: Path, kind: str, folder: Path) -> None:
    """Observe, and quantize from the file, as one of two ranks."""
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", rank=rank, world_size=2, store=store)
    observe(source, RECIPES[kind], samples(), folder / "s")
    oneshot(source, RECIPES[kind], statistics=folder / "s", output_dir=folder / "q")
    dist.destroy_process_group()


@pytest.mark.parametrize("kind", ["minmax", "optimal"])
def test_two_ranks_save_and_use_what_one_does(kind: str, source: Path, tmp_path: Path) -> None:
    ranks = [start_forked(rank_of_two, rank, source, kind, tmp_path) for rank in range(2)]
    for process in ranks:
        process.join(120)
        process.kill()
    assert [process.exitcode for process in ranks] == [0, 0]
    observe(source, RECIPES[kind], samples(), tmp_path / "alone", output_dir=tmp_path / "expected")
    assert (tmp_path / "s").read_bytes() == (tmp_path / "alone").read_bytes()
    assert contents(tmp_path / "q") == contents(tmp_path / "expected")


# -- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["save_statistics", "statistics"])
def test_runs_whose_parts_do_not_add_up(
    option: str, source: Path, saved: Path, tmp_path: Path
) -> None:
    given = {option: saved if option == "statistics" else tmp_path / "s"}
    gptq = GPTQModifier(scheme="W4A16", ignore=["lm_head"])
    with pytest.raises(PlanError, match=rf"{option}= does not work with GPTQModifier.*add up"):
        oneshot(source, gptq, **given, output_dir=tmp_path / "q")
    with pytest.raises(PlanError, match=rf"{option}= does not work with propagate_error.*add up"):
        oneshot(source, RECIPES["minmax"], propagate_error=True, **given, output_dir=tmp_path / "q")
    plain = QuantizationModifier(scheme="W8A16", ignore=["lm_head"])
    with pytest.raises(PlanError, match=rf"{option}= has no effect.*nothing to observe"):
        oneshot(source, plain, **given, output_dir=tmp_path / "q")
    assert not list(tmp_path.iterdir())


def test_options_that_exclude_each_other(source: Path, saved: Path, tmp_path: Path) -> None:
    recipe = RECIPES["minmax"]
    with pytest.raises(
        DataError, match="statistics= replaces calibration data: remove the dataset"
    ):
        oneshot(source, recipe, samples(), tmp_path / "q", statistics=saved)
    with pytest.raises(PlanError, match="exclude each other"):
        oneshot(source, recipe, statistics=saved, save_statistics=tmp_path / "s")
    with pytest.raises(PlanError, match="output_dir is missing"):
        oneshot(source, recipe, statistics=saved)
    with pytest.raises(DataError, match="pass dataset="):
        oneshot(source, recipe, save_statistics=tmp_path / "s")
    with pytest.raises(StatisticsError, match="is not a folder"):
        observe(source, recipe, samples(), tmp_path / "missing" / "s")
    with pytest.raises(StatisticsError, match="is a folder"):
        observe(source, recipe, samples(), tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        (static("static_minmax"), r"observer is 'MinMaxObserver' in the file"),
        (static("minmax", 4), r"format is 'int8 .*' in the file and 'int4 "),
        (
            static(
                "minmax",
                input_activations={
                    "num_bits": 8,
                    "strategy": "tensor",
                    "observer": "minmax",
                    "observer_kwargs": {"averaging_constant": 0.5},
                },
            ),
            r"options is .*0\.01.* in the file and .*0\.5",
        ),
        (weighed("optimal"), r"no importance for model\.layers\.0\.self_attn\.q_proj.*observe"),
        (RECIPES["output"], r"observer is 'MinMaxObserver'"),
        (RECIPES["kv_cache"], r"no statistics of the k of model\.layers\.0\.self_attn"),
    ],
)
def test_another_recipe(
    recipe: Any, message: str, source: Path, saved: Path, tmp_path: Path
) -> None:
    with pytest.raises(StatisticsError, match=message):
        oneshot(source, recipe, statistics=saved, output_dir=tmp_path / "q")
    assert not (tmp_path / "q").exists()


def test_another_model(saved: Path, tmp_path: Path) -> None:
    recipe = RECIPES["minmax"]
    for changes in ({"num_hidden_layers": 2}, {"intermediate_size": 256}):
        with pytest.raises(StatisticsError, match="'m', a model with another configuration"):
            oneshot(small_model("llama", **changes), recipe, statistics=saved)
    tuned = small_model("llama")
    tuned.get_submodule(NAME).weight.data[0, 0] += 1
    tuned.save_pretrained(tmp_path / "tuned")
    for model in (tuned, tmp_path / "tuned"):
        with pytest.raises(
            StatisticsError, match=rf"the weight of {NAME} was \(64, 128\) bfloat16"
        ):
            oneshot(model, recipe, statistics=saved, output_dir=tmp_path / "q")
    assert not (tmp_path / "q").exists()


def changed(path: Path, out: Path, change: Any) -> Path:
    """Write a file again with other content."""
    content, tensors = content_of(path), load_file(path)
    change(content, tensors)
    save_file(tensors, out, metadata={"steelyard": json.dumps(content)})
    return out


def test_other_modules_and_shapes(source: Path, saved: Path, tmp_path: Path) -> None:
    """Also where the configurations are said to be alike."""

    def rename(content: Any, tensors: Any) -> None:
        for observer in content["observers"]:
            observer[0] = observer[0].replace("layers.2", "layers.9")
        for name in [n for n in tensors if "layers.2" in n]:
            tensors[name.replace("layers.2", "layers.9")] = tensors.pop(name)

    def reshape(content: Any, _tensors: Any) -> None:
        content["weights"][NAME] = "(8, 8) bfloat16 0"

    for change, message in (
        (rename, r"another model: this one has no model\.layers\.9"),
        (reshape, rf"the weight of {NAME} was \(8, 8\)"),
    ):
        file = changed(saved, tmp_path / "s", change)
        with pytest.raises(StatisticsError, match=message):
            oneshot(source, RECIPES["minmax"], statistics=file, output_dir=tmp_path / "q")


def test_files_that_are_none(source: Path, saved: Path, tmp_path: Path) -> None:
    def refused(path: Path, message: str) -> None:
        with pytest.raises(StatisticsError, match=message):
            oneshot(source, RECIPES["minmax"], statistics=path, output_dir=tmp_path / "q")
        with pytest.raises(StatisticsError, match=message):
            merge_statistics([saved, path], tmp_path / "out")

    refused(tmp_path / "missing", "there is no statistics file")
    refused(tmp_path, "there is no statistics file")
    cut = tmp_path / "cut"
    for size in (0, 7, 100, saved.stat().st_size - 1):
        cut.write_bytes(saved.read_bytes()[:size])
        refused(cut, "is not a statistics file, or is truncated")
    save_file({"x": torch.ones(1)}, tmp_path / "tensors")
    refused(tmp_path / "tensors", "holds no statistics of a run")
    for kind in ("importance 1", "[]", "{"):
        save_file({"x": torch.ones(1)}, tmp_path / "x", metadata={"steelyard": kind})
        refused(tmp_path / "x", "holds no statistics of a run")

    def version(content: Any, _: Any) -> None:
        content["version"] = 2

    def foreign(_: Any, tensors: Any) -> None:
        tensors["x.y"] = torch.ones(1)

    def without(content: Any, _: Any) -> None:
        del content["kinds"]

    refused(changed(saved, tmp_path / "v", version), "has version 2 of the format")
    refused(
        changed(saved, tmp_path / "f", foreign), "damaged .*tensors without an observer, such as x"
    )
    refused(changed(saved, tmp_path / "w", without), "damaged .*kinds")
    assert not (tmp_path / "q").exists() and not (tmp_path / "out").exists()


def test_files_that_cannot_be_joined(source: Path, saved: Path, tmp_path: Path) -> None:
    def refused(paths: Any, message: str) -> None:
        with pytest.raises(StatisticsError, match=message):
            merge_statistics(paths, tmp_path / "out")

    refused([], "needs a list of one or more files")
    refused(str(saved), "needs a list of one or more files")
    refused([saved, saved], "is given twice, which would count twice")
    copy = tmp_path / "copy"
    copy.write_bytes(saved.read_bytes())
    refused([saved, copy], "copy hold the same data")
    data = samples(seed=1)
    observe(source, RECIPES["minmax"], data, tmp_path / "other")
    merge_statistics([saved, tmp_path / "other"], tmp_path / "both")
    refused([tmp_path / "other", tmp_path / "both"], "hold the same data")
    for name, recipe, message in (
        ("observer", RECIPES["static_minmax"], r"observer is 'StaticMinMaxObserver'"),
        ("bits", static("minmax", 4), r"bits does not fit input of model.*format is 'int4"),
        ("base", RECIPES["optimal"], r"the input of model\.layers\.0.* is only in .*s\.safetens"),
        (
            "ignore",
            QuantizationModifier(
                config_groups=static("minmax").config_groups, ignore=["lm_head", "re:.*down_proj"]
            ),
            r"down_proj is only in .*s\.safetensors; use the same recipe for all runs",
        ),
    ):
        observe(source, recipe, data, tmp_path / name)
        refused([saved, tmp_path / name], message)
    observe(small_model("llama", num_hidden_layers=2), RECIPES["minmax"], data, tmp_path / "less")
    refused([saved, tmp_path / "less"], "models with different configurations, 'm' and")
    tuned = small_model("llama")
    tuned.get_submodule(NAME).weight.data[0, 0] += 1
    observe(tuned, RECIPES["minmax"], data, tmp_path / "tuned")
    refused([saved, tmp_path / "tuned"], rf"different models; the weight of {NAME} is \(64, 128\)")
    with pytest.raises(StatisticsError, match="is not a folder"):
        merge_statistics([saved], tmp_path / "missing" / "out")
    assert not (tmp_path / "out").exists()


def test_a_file_appears_whole_or_not_at_all(
    source: Path, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(handle: int, data: Any) -> int:
        write(handle, data[:4])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    before = saved.read_bytes()
    (tmp_path / "s").write_bytes(before)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(OSError, match="s cannot be written: No space left"):
        merge_statistics([saved], tmp_path / "s")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"s": before}
