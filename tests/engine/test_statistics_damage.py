"""Statistics files with values that no observer could have seen: refused, with where and what."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import token_batches
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from steelyard import oneshot
from steelyard.engine.statistics import merge_statistics
from steelyard.errors import StatisticsError
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier
from steelyard.observers import Observer
from steelyard.observers.observer_state import load, save

NAME = "model.layers.1.mlp.down_proj"
Tensors = dict[str, torch.Tensor]
Change = Callable[[dict[str, Any], Tensors], None]


def recipe(observer: str) -> list[Any]:
    group = {
        "targets": ["Linear"],
        "weights": {"num_bits": 8, "strategy": "channel", "observer": "imatrix_mse"},
        "input_activations": {"num_bits": 8, "strategy": "tensor", "observer": observer},
    }
    plain = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    return [IMatrixGatherer(ignore=["lm_head"]), plain]


@pytest.fixture(scope="module")
def saved(source: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("saved")
    for observer in ("static_minmax", "minmax"):
        kept = folder / observer
        oneshot(source, recipe(observer), token_batches(), save_statistics=kept)
    return {path.name: path for path in folder.iterdir()}


def content_of(path: Path) -> dict[str, Any]:
    with safe_open(path, "pt") as file:
        return dict(json.loads(file.metadata()["steelyard"]))


def changed(path: Path, out: Path, change: Change) -> Path:
    content, tensors = content_of(path), load_file(path)
    change(content, tensors)
    content["runs"][0]["data"] = "of other data"  # or the files could not be joined
    save_file(tensors, out, metadata={"steelyard": json.dumps(content)})
    return out


def value(leaf: str, new: float) -> Change:
    def change(_: Any, tensors: Tensors) -> None:
        tensors[f"{NAME}.{leaf}"].view(-1)[0] = new

    return change


def replaced(leaf: str, new: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(_: Any, tensors: Tensors) -> None:
        tensors[f"{NAME}.{leaf}"] = new(tensors[f"{NAME}.{leaf}"]).contiguous()

    return change


def removed(leaf: str) -> Change:
    def change(_: Any, tensors: Tensors) -> None:
        del tensors[f"{NAME}.{leaf}"]

    return change


def count(place: int, new: Any) -> Change:
    def change(content: Any, _: Tensors) -> None:
        (entry,) = (e for e in content["observers"] if e[:2] == [NAME, "input"])
        entry[place] = new

    return change


NAN, INF = float("nan"), float("inf")
DAMAGED: dict[str, tuple[str, Change, str]] = {
    "nan": ("static_minmax", value("input.max_vals", NAN), "max_vals holds NaN or infinity in 1 "),
    "infinity": ("static_minmax", value("input.min_vals", -INF), "min_vals holds NaN or infinity"),
    "history": ("minmax", value("input.max_vals_history", INF), "max_vals_history holds NaN"),
    "swapped": ("static_minmax", value("input.min_vals", 1e9), "min_vals exceeds max_vals: 1e"),
    "swapped before": ("minmax", value("input.min_vals_history", 1e9), "min_vals_history exceeds"),
    "integers": (
        "static_minmax",
        replaced("input.min_vals", lambda t: t.to(torch.int32)),
        "min_vals is of type int32",
    ),
    "booleans": (
        "static_minmax",
        replaced("input.max_vals", lambda t: t.to(torch.bool)),
        "max_vals is of type bool",
    ),
    "two values": (
        "static_minmax",
        lambda c, t: [replaced(f"input.{n}_vals", lambda v: v.repeat(2))(c, t) for n in LOW_HIGH],
        "min_vals has shape",
    ),
    "other shape": (
        "minmax",
        replaced("input.min_vals_history", lambda t: t[:1]),
        "min_vals_history and max_vals_history have the shapes",
    ),
    "half": ("static_minmax", removed("input.max_vals"), "it has min_vals but no max_vals"),
    "importance": ("minmax", value("weight._imatrix_sum", NAN), "_imatrix_sum holds NaN"),
    "importance below zero": ("minmax", value("weight._imatrix_sum", -1.0), "below zero: -1"),
    "tokens below zero": ("minmax", value("weight._imatrix_count", -1), "_imatrix_count is below"),
    "bins": ("minmax", value("weight._imatrix_bins", INF), "_imatrix_bins holds NaN"),
    "type": ("minmax", count(5, "float8_e4m3fn"), "dtype is 'float8_e4m3fn'"),
    "no type": ("minmax", count(5, "save"), "dtype is 'save'"),
}
LOW_HIGH = ("min", "max")


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_values(case: str, source: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    observer, change, message = DAMAGED[case]
    file = changed(saved[observer], tmp_path / "damaged", change)
    with pytest.raises(StatisticsError, match=message) as found:
        oneshot(source, recipe(observer), statistics=file, output_dir=tmp_path / "q")
    assert NAME in str(found.value) and "damaged" in str(found.value)
    assert "observe the data again" in str(found.value)
    for files in ([file], [saved[observer], file]):
        with pytest.raises(StatisticsError, match=message) as found:
            merge_statistics(files, tmp_path / "out")
        assert NAME in str(found.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged"]


@pytest.mark.parametrize("place", [3, 4])
@pytest.mark.parametrize("new", [-1, 1.5, "1", True, None])
def test_damaged_counts(place: int, new: Any, saved: dict[str, Path], tmp_path: Path) -> None:
    file = changed(saved["minmax"], tmp_path / "damaged", count(place, new))
    with pytest.raises(StatisticsError, match=rf"damaged \(observers\.\d+\.{place}: "):
        merge_statistics([file], tmp_path / "out")


def test_importance_of_another_width(source: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    change = replaced("weight._imatrix_sum", lambda t: t[:-1])
    file = changed(saved["minmax"], tmp_path / "damaged", change)
    with pytest.raises(StatisticsError, match=f"importance of {NAME} has shape .* input channels"):
        oneshot(source, recipe("minmax"), statistics=file, output_dir=tmp_path / "q")


def test_undamaged_file_is_taken(source: Path, saved: dict[str, Path], tmp_path: Path) -> None:
    for observer, path in saved.items():
        file = changed(path, tmp_path / observer, lambda _c, _t: None)
        merge_statistics([path, file], tmp_path / f"{observer}-merged")
        folder = tmp_path / f"{observer}-out"
        oneshot(source, recipe(observer), statistics=path, output_dir=folder)


# -- what the metadata says ---------------------------------------------------------------------


def changes(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    for new in (..., None, -1, 1.5, [None], {"": None}):
        if path:
            yield path, new
    inner: Any = value.items() if isinstance(value, dict) else ()
    for key, each in enumerate(value) if isinstance(value, list) else inner:
        yield from changes(each, (*path, key))


def test_metadata_of_other_types(saved: dict[str, Path], tmp_path: Path) -> None:
    """Read without a word only if what was changed is a name, a note or an option of no effect."""
    content, tensors = content_of(saved["minmax"]), load_file(saved["minmax"])
    cases, refused = random.Random(0).sample(list(changes(content)), 120), 0
    for path, new in cases:
        other = copy.deepcopy(content)
        parent = other
        for key in path[:-1]:
            parent = parent[key]
        if new is ...:
            del parent[path[-1]]
        else:
            parent[path[-1]] = new
        metadata = {"steelyard": json.dumps(other)}
        save_file(tensors, tmp_path / "damaged", metadata=metadata)
        try:
            merge_statistics([tmp_path / "damaged"], tmp_path / "out")
        except StatisticsError as error:
            assert "damaged" in str(error)
            refused += 1
    assert refused > 90


# -- the file of one observer -------------------------------------------------------------------


@pytest.mark.parametrize("new", [NAN, INF, -INF, 1e9])
def test_file_of_one_observer(new: float, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationArgs

    def build() -> Observer:
        args = QuantizationArgs(num_bits=8, strategy="tensor")
        return Observer.load_from_registry("static_minmax", base_name="input", args=args)

    observer = build()
    observer(torch.linspace(-1, 1, 8).reshape(1, 8))
    save(observer, tmp_path / "one")
    load(build(), tmp_path / "one")
    with safe_open(tmp_path / "one", "pt") as file:
        metadata = file.metadata()
    tensors = load_file(tmp_path / "one")
    tensors["min_vals"].fill_(new)
    save_file(tensors, tmp_path / "one", metadata=metadata)
    with pytest.raises(StatisticsError, match="min_vals"):
        load(build(), tmp_path / "one")
