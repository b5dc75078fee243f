"""Importance and statistics of a run: checked first, and in place before the checkpoint is."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from families import token_batches
from safetensors.torch import load_file
from torch.testing import assert_close

from steelyard import oneshot
from steelyard.engine.run import Run
from steelyard.engine.statistics import merge_statistics
from steelyard.engine.statistics_file import Statistics
from steelyard.errors import (
    CheckpointError,
    ImportanceError,
    OutputError,
    PlanError,
    StatisticsError,
)
from steelyard.modifiers import IMatrixGatherer, QuantizationModifier
from steelyard.observers.importance_file import load_importance, save_importance


@pytest.fixture(scope="module")
def expected(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    run(source, folder)
    return folder


def recipe(importance: Path) -> list[Any]:
    args = {"num_bits": 3, "strategy": "group", "group_size": 32, "observer": "optimal"}
    groups = {"group_0": {"targets": ["Linear"], "weights": args}}
    quantize = QuantizationModifier(config_groups=groups, ignore=["lm_head"])
    return [IMatrixGatherer(save_to=str(importance)), quantize]


def run(source: Path, folder: Path, **options: Any) -> Any:
    """Quantize to q, saving importance to i and statistics to s, all in one folder."""
    return oneshot(
        source,
        recipe(folder / "i"),
        token_batches(),
        folder / "q",
        save_statistics=folder / "s",
        **options,
    )


def assert_complete(folder: Path, expected: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["i", "q", "s"]
    for name in ("i", "q/model.safetensors"):
        assert (folder / name).read_bytes() == (expected / name).read_bytes(), name
    # not its bytes: the recipe in it names the file that importance goes to
    assert_close(load_file(folder / "s"), load_file(expected / "s"), rtol=0, atol=0)


# -- killed, or out of space ----------------------------------------------------------------------


def child(source: Path, folder: Path, wanted: int) -> None:
    """Run, and end right after a rename, counted from the end of the calibration."""
    counted = [-1]
    end = Run.end

    def ending(self: Run) -> None:
        counted[0] = 0
        end(self)

    def dying(real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            counted[0] += counted[0] >= 0
            found = real(*args, **options)
            if counted[0] == wanted:
                os._exit(7)
            return found

        return call

    Run.end = ending  # type: ignore[method-assign]
    os.rename, os.replace = dying(os.rename), dying(os.replace)
    run(source, folder)


def test_killed_at_any_rename_of_the_end(source: Path, expected: Path, tmp_path: Path) -> None:
    """Once the checkpoint is in place its files are, and the same command ends with all of them."""
    seen = set()
    for wanted in range(1, 40):
        folder = tmp_path / str(wanted)
        folder.mkdir()
        process = os.fork()
        if process == 0:
            try:
                child(source, folder, wanted)
                os._exit(0)
            finally:
                os._exit(1)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        there = frozenset(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if code == 0:
            break
        assert code == 7
        assert "q" not in there or {"i", "s"} < there
        seen.add(there)
        result = run(source, folder)
        assert result.output_dir == folder / "q"
        assert_complete(folder, expected)
    assert code == 0
    assert_complete(folder, expected)
    assert {frozenset(), frozenset("s"), frozenset("si")} < seen


@pytest.mark.parametrize("name", ["i", "s"])
def test_full_disk(
    name: str, source: Path, expected: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = os.write

    def full(handle: int, data: Any) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().name.startswith(f".{name}."):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(OutputError, match=f"{name} cannot be written: No space left.*again"):
            run(source, tmp_path)
    assert not (tmp_path / "q").exists() and not (tmp_path / name).exists()
    run(source, tmp_path)
    assert_complete(tmp_path, expected)


# -- refused before any work ----------------------------------------------------------------------


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(self: Run, *args: Any) -> None:
        raise AssertionError("it began")

    for name in ("layer_by_layer", "whole", "stream", "weights_only"):
        monkeypatch.setattr(Run, name, work)


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_files_of_the_source_are_safe(name: str, source: Path, tmp_path: Path) -> None:
    before = (source / name).read_bytes()
    with pytest.raises(ImportanceError, match="holds no importance of Steelyard"):
        oneshot(source, recipe(source / name), token_batches(), tmp_path / "q")
    with pytest.raises(StatisticsError, match="holds no statistics of Steelyard"):
        oneshot(source, recipe(tmp_path / "i"), token_batches(), save_statistics=source / name)
    with pytest.raises(ImportanceError, match="holds no importance"):
        save_importance({}, source / name)
    with pytest.raises(StatisticsError, match="holds no statistics"):
        merge_statistics([tmp_path / "s"], source / name)
    assert (source / name).read_bytes() == before


@pytest.mark.usefixtures("no_work")
def test_places_that_cannot_be(source: Path, expected: Path, tmp_path: Path) -> None:
    data = token_batches()
    with pytest.raises(ImportanceError, match="none is not a folder"):
        oneshot(source, recipe(tmp_path / "none" / "i"), data, tmp_path / "q")
    with pytest.raises(StatisticsError, match="holds no statistics"):  # another kind of ours
        oneshot(source, recipe(tmp_path / "i"), data, save_statistics=expected / "i")
    with pytest.raises(PlanError, match="i is named for two files"):
        both = tmp_path / "i"
        oneshot(source, recipe(both), data, tmp_path / "q", save_statistics=both)
    old = tmp_path / "q"
    old.mkdir()
    with pytest.raises(PlanError, match="lies in the output folder"):
        oneshot(source, recipe(old / "i"), data, old, overwrite=True)
    with pytest.raises(CheckpointError, match="empty text"):
        oneshot(source, recipe(tmp_path / "i"), data, "")
    assert [path.name for path in tmp_path.iterdir()] == ["q"]


def test_own_files_are_replaced(source: Path, expected: Path, tmp_path: Path) -> None:
    for name in ("i", "s"):
        (tmp_path / name).write_bytes((expected / name).read_bytes())
    save_importance({"x": load_importance(expected / "i").popitem()[1]}, tmp_path / "i")
    run(source, tmp_path)
    assert_complete(tmp_path, expected)
    assert Statistics.read(tmp_path / "s").observers
    assert load_file(tmp_path / "i").keys() == load_file(expected / "i").keys()
