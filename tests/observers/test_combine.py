"""Joining statistics: what may be merged, what a file holds, and what is refused."""

from __future__ import annotations

import copy
import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs
from nvfp4 import nvfp4
from safetensors.torch import save_file
from torch import distributed as dist
from torch.testing import assert_close

from steelyard.errors import ImportanceWarning, StatisticsError
from steelyard.observers import (
    IMatrixMSEObserver,
    MemorylessMinMaxObserver,
    MemorylessMSEObserver,
    MinMaxObserver,
    MovingAverageMSEObserver,
    Observer,
    StaticMinMaxObserver,
)
from steelyard.observers.combine import combine
from steelyard.observers.observer_state import state_of

INT8 = QuantizationArgs(num_bits=8, strategy="tensor")
INT4_GROUP = QuantizationArgs(num_bits=4, strategy="group", group_size=4)
ACCUMULATING = [StaticMinMaxObserver, MinMaxObserver, MovingAverageMSEObserver]


class Averaging(MemorylessMinMaxObserver):
    """A user's observer that declares a mean over observations."""

    _act_sync_dict = {"mean": dist.ReduceOp.AVG}  # noqa: RUF012
    _statistics = ("min_vals", "max_vals", "mean")

    def update_statistics_from_observed(self, observed: torch.Tensor) -> None:
        super().update_statistics_from_observed(observed)
        seen = self.num_updates
        before = getattr(self, "mean", torch.zeros(1))
        self.mean = (before * seen + observed.mean().reshape(1)) / (seen + 1)


class Unchecked(StaticMinMaxObserver):
    """A user's observer that reads its options from its args."""

    Options = None


def observe(observer: Observer, *values: torch.Tensor) -> Observer:
    for value in values:
        observer(value)
    return observer


# -- merging ------------------------------------------------------------------------------------


def test_static_merge_is_exact() -> None:
    values = [torch.randn(2, 3, 8) for _ in range(5)]
    args = QuantizationArgs(num_bits=8, strategy="group", group_size=4)
    first, second = StaticMinMaxObserver("input", args), StaticMinMaxObserver("input", args)
    observe(first, *values[:2]).merge(observe(second, *values[2:]))
    whole = observe(StaticMinMaxObserver("input", args), *values)
    assert_close(first.get_statistics(), whole.get_statistics(), rtol=0, atol=0)
    assert (first.num_updates, first.num_observed_tokens) == (5, 30)


@pytest.mark.parametrize("cls", ACCUMULATING)
def test_merging_with_nothing_changes_nothing(cls: type[Observer]) -> None:
    x = torch.randn(3, 8, dtype=torch.bfloat16)
    alone = cls("input", INT8)(x)
    right = cls("input", INT8)(x).merge(cls("input", INT8))
    left = cls("input", INT8).merge(cls("input", INT8)(x))
    for merged in (right, left):
        assert_close(merged.get_statistics(), alone.get_statistics())
        assert_close(merged.get_qparams(), alone.get_qparams(), rtol=0, atol=0)
        assert (merged.num_updates, merged.num_observed_tokens) == (1, 3)
    assert not cls("input", INT8).merge(cls("input", INT8)).has_statistics


def test_declared_average_is_weighed_by_observations() -> None:
    values = torch.tensor([[[1.0]], [[2.0]], [[6.0]], [[7.0]]])
    first, second = Averaging("input", INT8), Averaging("input", INT8)
    observe(first, values[0]).merge(observe(second, *values[1:]))
    assert_close(first.mean, torch.tensor([4.0]))
    assert_close(Averaging("input", INT8).merge(second).mean, torch.tensor([5.0]))


@pytest.mark.parametrize("cls", [MemorylessMinMaxObserver, MemorylessMSEObserver])
def test_observer_without_memory_cannot_be_merged(cls: type[Observer]) -> None:
    first, second = cls("input", INT8)(torch.randn(2, 4)), cls("input", INT8)(torch.randn(2, 4))
    with pytest.raises(StatisticsError, match=r"nothing to merge: use .* such as static_minmax"):
        first.merge(second)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (StaticMinMaxObserver("input", INT8), r"MinMaxObserver.* and .*StaticMinMaxObserver"),
        (MinMaxObserver("output", INT8), r"input \(MinMaxObserver\) and output \(MinMaxObserver"),
        (MinMaxObserver("input", INT4_GROUP), r"num_bits 8 and 4; strategy tensor and group; grou"),
        (
            MinMaxObserver("input", QuantizationArgs(num_bits=8, symmetric=False)),
            "symmetric True and False",
        ),
        (
            MinMaxObserver("input", INT8, averaging_constant=0.5),
            r"averaging_constant\W+0\.01.* and .*averaging_constant\W+0\.5",
        ),
    ],
)
def test_unlike_observers_are_not_merged(other: Observer, message: str) -> None:
    observer = MinMaxObserver("input", INT8)(torch.randn(2, 4))
    before = copy.deepcopy(observer.get_statistics())
    with pytest.raises(StatisticsError, match=message):
        observer.merge(other)
    assert_close(observer.get_statistics(), before, rtol=0, atol=0)


def test_undeclared_options_are_compared_too() -> None:
    first = Unchecked("input", INT8, power=2)(torch.randn(2, 4))
    with pytest.raises(StatisticsError, match="power"):
        first.merge(Unchecked("input", INT8, power=3)(torch.randn(2, 4)))


@pytest.mark.parametrize("cls", ACCUMULATING)
def test_different_shapes_are_not_merged(cls: type[Observer]) -> None:
    args = QuantizationArgs(num_bits=8, strategy="group", group_size=4)
    first, second = cls("input", args)(torch.randn(2, 8)), cls("input", args)(torch.randn(2, 12))
    message = r"min_vals\w* has shape \(2,\) .* \(3,\) on the other"
    with pytest.raises(StatisticsError, match=message):
        first.merge(second)
    assert first.num_updates == 1


@pytest.mark.parametrize("cls", ACCUMULATING)
def test_statistics_gathered_in_inference_mode_can_be_merged(cls: type[Observer]) -> None:
    values = [torch.randn(3, 8) for _ in range(2)]
    first, second = cls("input", INT8), cls("input", INT8)
    with torch.inference_mode():
        first(values[0])
        second(values[1])
    whole = observe(cls("input", INT8), *values)
    assert_close(first.merge(second).get_statistics(), whole.get_statistics())


class Calculating(Observer):
    """A user's observer of the first generation."""

    def calculate_qparams(
        self,
        observed: Any,
        reduce_dims: Any = None,
        tensor_id: Any = None,
        global_scale: Any = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return observed.abs().amax().reshape(1) / 127, torch.zeros(1, dtype=torch.int8)


def test_statistics_that_are_not_declared_are_those_of_the_last_observation() -> None:
    values = [torch.tensor([[-1.0, 1.0]]), torch.tensor([[-3.0, 2.0]])]
    first, second = (Averaging("input", INT8)(value) for value in values)
    merged = first.merge(second).merge(Averaging("input", INT8))
    whole = observe(Averaging("input", INT8), *values)
    assert_close(merged.get_statistics(), whole.get_statistics())


def test_an_observer_that_only_calculates_joins_with_none_that_observed() -> None:
    observed = Calculating("input", INT8)(torch.tensor([[127.0]]))
    states = [state_of(observed), state_of(Calculating("input", INT8))]
    alone = Calculating("input", INT8)
    combine(alone, states)
    assert_close(alone.get_qparams(), observed.get_qparams(), rtol=0, atol=0)
    with pytest.raises(
        StatisticsError, match=r"defines only calculate_qparams.* cannot be combined"
    ):
        combine(alone, [states[0], states[0]])


@pytest.mark.parametrize("name", Observer.registered_names())
def test_merging_files_and_ranks_give_one_answer(name: str) -> None:
    cls = Observer.get_value_from_registry(name)
    if not cls._act_sync_dict:
        pytest.skip("keeps only its last observation")
    gathers = "_imatrix_sum" in cls._act_sync_dict
    args = INT4_GROUP if gathers else INT8
    parts = [cls("weight" if gathers else "input", args) for _ in range(3)]
    for number, part in enumerate(parts):
        x = torch.randn(5, 8, generator=torch.Generator().manual_seed(number)) * 10**number
        if gathers:
            linear = torch.nn.Linear(8, 4)
            part.attach(linear)
            linear(x)
        else:
            part(x)
    at_once = cls(parts[0].base_name, args)
    combine(at_once, [state_of(part) for part in parts])
    in_steps = parts[0].merge(parts[1]).merge(parts[2])
    assert_close(at_once.get_statistics(), in_steps.get_statistics(), rtol=0, atol=0)
    assert at_once.num_updates == in_steps.num_updates


# -- a file -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", Observer.registered_names())
def test_loading_brings_everything_back(name: str, tmp_path: Path) -> None:
    observer = Observer.load_from_registry(name, base_name="weight", args=INT4_GROUP)
    if isinstance(observer, IMatrixMSEObserver):
        linear = torch.nn.Linear(8, 4)
        observer.attach(linear)
        linear(torch.randn(5, 8))
        observer.detach(linear)
    weight = torch.randn(4, 8, dtype=torch.bfloat16)
    observe(observer, weight, weight * 2)
    path = tmp_path / "statistics.safetensors"
    observer.save_statistics(path)
    fresh = type(observer)("weight", INT4_GROUP)
    assert fresh.load_statistics(str(path)) is fresh
    assert_close(fresh.get_statistics(), observer.get_statistics(), rtol=0, atol=0)
    assert_close(fresh.get_qparams(), observer.get_qparams(), rtol=0, atol=0)
    assert (fresh.num_updates, fresh.observed_dtype) == (2, torch.bfloat16)
    more = torch.randn(4, 8, dtype=torch.bfloat16)
    assert_close(fresh(more).get_qparams(), observer(more).get_qparams(), rtol=0, atol=0)


def test_tokens_come_back(tmp_path: Path) -> None:
    observer = MinMaxObserver("input", INT8)(torch.randn(2, 3, 8))
    observer.save_statistics(tmp_path / "s")
    assert MinMaxObserver("input", INT8).load_statistics(tmp_path / "s").num_observed_tokens == 6


def test_loading_replaces_what_was_observed(tmp_path: Path) -> None:
    small = StaticMinMaxObserver("input", INT8)(torch.tensor([[-1.0, 1.0]]))
    small.save_statistics(tmp_path / "s")
    large = StaticMinMaxObserver("input", INT8)(torch.tensor([[-9.0, 9.0]]))
    large.load_statistics(tmp_path / "s")
    assert_close(large.max_vals, torch.tensor([1.0]))
    assert large.num_updates == 1


def test_loading_forgets_what_the_file_does_not_hold(tmp_path: Path) -> None:
    gathered, weight = IMatrixMSEObserver("weight", INT4_GROUP, strict=False), torch.randn(4, 8)
    with pytest.warns(ImportanceWarning, match="missing"):
        IMatrixMSEObserver("weight", INT4_GROUP)(weight).save_statistics(tmp_path / "s")
    linear = torch.nn.Linear(8, 4)
    gathered.attach(linear)
    linear(torch.randn(5, 8))
    gathered.detach(linear)
    gathered.load_statistics(tmp_path / "s")
    assert set(gathered.get_statistics()) == {"min_vals", "max_vals", "absmax"}


def test_loaded_range_is_not_searched_again_in_the_weight_observed_before(tmp_path: Path) -> None:
    args = nvfp4()
    saved = MemorylessMSEObserver("weight", args)(torch.randn(4, 32))
    saved.save_statistics(tmp_path / "s")
    observer = MemorylessMSEObserver("weight", args)(torch.randn(4, 32))
    observer.load_statistics(tmp_path / "s")
    Observer.fuse([observer, MemorylessMSEObserver("weight", args)(torch.randn(4, 32) * 9)])
    found = observer.chosen_range(observer.get_global_scale())
    assert_close(found, (saved.min_vals, saved.max_vals), rtol=0, atol=0)


def test_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    values = [torch.randn(3, 8) for _ in range(6)]
    whole = observe(MovingAverageMSEObserver("input", INT8), *values)
    observe(MovingAverageMSEObserver("input", INT8), *values[:4]).save_statistics(tmp_path / "s")
    resumed = MovingAverageMSEObserver("input", INT8).load_statistics(tmp_path / "s")
    observe(resumed, *values[4:])
    assert_close(resumed.get_statistics(), whole.get_statistics(), rtol=0, atol=0)


def test_nothing_observed_cannot_be_saved(tmp_path: Path) -> None:
    observer = StaticMinMaxObserver("input", INT8)
    observer.module_name = "experts.7.w2"
    with pytest.raises(
        StatisticsError, match=r"input of experts\.7\.w2 .* has no statistics to save"
    ):
        observer.save_statistics(tmp_path / "s")
    assert list(tmp_path.iterdir()) == []


def test_file_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError("interrupted")

    path = tmp_path / "s"
    observer = StaticMinMaxObserver("input", INT8)(torch.ones(1, 2))
    observer.save_statistics(path)
    before = path.read_bytes()
    # whatever was written by then, the last step is to put it in place of the old file
    monkeypatch.setattr(Path, "replace", fail)
    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="interrupted"):
        observer(torch.full((1, 2), 5.0)).save_statistics(path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_saving_replaces_an_older_file(tmp_path: Path) -> None:
    observer = StaticMinMaxObserver("input", INT8)(torch.ones(1, 2))
    observer.save_statistics(tmp_path / "s")
    observer(torch.full((1, 2), 5.0)).save_statistics(tmp_path / "s")
    loaded = StaticMinMaxObserver("input", INT8).load_statistics(tmp_path / "s")
    assert_close(loaded.max_vals, torch.tensor([5.0]))
    assert [file.name for file in tmp_path.iterdir()] == ["s"]


def test_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    observer = StaticMinMaxObserver("input", INT8)(torch.ones(1, 2))
    observer.save_statistics(tmp_path / "s")
    tmp_path.joinpath("ordinary").touch()
    modes = [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("s", "ordinary")]
    assert modes[0] == modes[1]


# -- files that do not fit ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reader", "message"),
    [
        (MovingAverageMSEObserver("input", INT8), "observer is 'MinMaxObserver' in the file and "),
        (MinMaxObserver("output", INT8), "base_name is 'input' in the file and 'output' here"),
        (MinMaxObserver("input", INT4_GROUP), "format is "),
        *(
            (MinMaxObserver("input", INT8.model_copy(update=field)), "format is ")
            for field in (
                {"num_bits": 4},
                {"type": "float"},
                {"symmetric": False},
                {"scale_dtype": torch.float16},
            )
        ),
        (
            MinMaxObserver("input", INT8, averaging_constant=0.5),
            "options is {'headroom': 1.0, 'averaging_constant': 0.01} in the file and "
            "{'headroom': 1.0, 'averaging_constant': 0.5}",
        ),
    ],
)
def test_file_of_another_observer_is_refused(
    reader: Observer, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "s.safetensors"
    MinMaxObserver("input", INT8)(torch.ones(1, 4)).save_statistics(path)
    reader.reset()
    reader(torch.full((1, 4), 2.0))
    before = copy.deepcopy(reader.get_statistics())
    with pytest.raises(StatisticsError) as caught:
        reader.load_statistics(path)
    assert f"{path} does not fit {reader.label}" in str(caught.value)
    assert message in str(caught.value)
    assert_close(reader.get_statistics(), before, rtol=0, atol=0)


def test_format_is_compared_not_its_spelling(tmp_path: Path) -> None:
    by_default, spelled = QuantizationArgs(num_bits=8), QuantizationArgs(num_bits=8, type="int")
    assert by_default == spelled
    StaticMinMaxObserver("input", by_default)(torch.ones(1, 4)).save_statistics(tmp_path / "s")
    loaded = StaticMinMaxObserver("input", spelled).load_statistics(tmp_path / "s")
    assert_close(loaded.max_vals, torch.ones(1))


def test_file_with_other_undeclared_options_is_refused(tmp_path: Path) -> None:
    Unchecked("input", INT8, power=2)(torch.ones(1, 4)).save_statistics(tmp_path / "s")
    with pytest.raises(StatisticsError, match="power"):
        Unchecked("input", INT8, power=3).load_statistics(tmp_path / "s")


@pytest.mark.parametrize("content", [b"", b"not a tensor", b"\xff" * 64])
def test_file_that_is_no_safetensors_is_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "s"
    path.write_bytes(content)
    with pytest.raises(StatisticsError, match=rf"{path} is not a readable safetensors file"):
        MinMaxObserver("input", INT8).load_statistics(path)


def test_truncated_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s"
    MinMaxObserver("input", INT8)(torch.ones(1, 4)).save_statistics(path)
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(StatisticsError, match="not a readable safetensors file"):
        MinMaxObserver("input", INT8).load_statistics(path)


def test_missing_file_is_reported_as_such(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        MinMaxObserver("input", INT8).load_statistics(tmp_path / "absent")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        {"format": "pt"},
        {"steelyard": "not json"},
        {"steelyard": "[1]"},
    ],
)
def test_safetensors_of_another_program_are_refused(metadata: Any, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"min_vals": torch.ones(1), "max_vals": torch.ones(1)}, path, metadata=metadata)
    with pytest.raises(
        StatisticsError, match=re.escape(f"{path} holds no observer statistics written by steely")
    ):
        StaticMinMaxObserver("input", INT8).load_statistics(path)


def test_statistic_that_the_observer_does_not_keep_is_refused(tmp_path: Path) -> None:
    class StaticMinMaxObserver(Averaging):
        """Writes under another observer's name."""

        _statistics = (*Averaging._statistics, "extra")
        extra = torch.zeros(1)

    path = tmp_path / "s"
    StaticMinMaxObserver("input", INT8)(torch.ones(1, 4)).save_statistics(path)
    with pytest.raises(StatisticsError, match="it holds extra, mean, which input"):
        globals()["StaticMinMaxObserver"]("input", INT8).load_statistics(path)
