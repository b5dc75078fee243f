"""A run that is killed at any moment can be resumed, and ends with the same bytes."""

from __future__ import annotations

import errno
import hashlib
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from families import small_model, token_batches
from forked import start_forked
from interruption import Stop, lasting, small_steps, stop_at_mark
from safetensors.torch import save_file

from steelyard import oneshot
from steelyard.checkpoint import CheckpointWriter, Shards, work_folder
from steelyard.checkpoint.growing_shards import GrowingShards
from steelyard.checkpoint.work_folder import WorkFolder
from steelyard.engine import identity
from steelyard.errors import CalibrationError, CheckpointError
from steelyard.modifiers import QuantizationModifier
from steelyard.observers.calibration import Calibration

STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
}


def recipe(kind: str) -> QuantizationModifier:
    if kind == "stream":
        return QuantizationModifier(
            scheme="NVFP4A16", weight_observer="memoryless_mse", ignore=["lm_head"]
        )
    return QuantizationModifier(config_groups={"group_0": STATIC}, ignore=["lm_head"])


def run(source: Path, out: Path, kind: str, **options: Any) -> Any:
    """Quantize, with a mark after every step and shards of a few tensors."""
    data = None if kind == "stream" else token_batches()
    with small_steps():
        return oneshot(source, recipe(kind), data, out, **options)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "source"
    small_model("llama", num_hidden_layers=4).save_pretrained(folder, max_shard_size="200KB")
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(scope="module", params=["stream", "layers"])
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def expected(source: Path, kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    out = tmp_path_factory.mktemp("undisturbed") / "out"
    process = start_forked(run, source, out, kind)
    process.join()
    assert process.exitcode == 0
    return contents(out)


def contents(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(file.relative_to(folder)): hashlib.sha256(lasting(file)).hexdigest() for file in files
    }


def ends_well(source: Path, out: Path, kind: str, expected: dict[str, str], before: Any) -> None:
    """The same command, once more: the output is whole, and nothing else is left or changed."""
    if contents(out) != expected:  # else the last one died between its last act and its end
        assert not out.exists()
    run(source, out, kind)
    assert contents(out) == expected
    assert [path.name for path in out.parent.iterdir()] == [out.name]
    assert contents(source) == before


# -- kill -9 ------------------------------------------------------------------------------------


def test_killed_at_any_moment(
    source: Path, kind: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """50 kills of real processes in all, at random moments; also of those that were resumed."""
    before = contents(source)
    chance = random.Random(0)
    kills = rounds = resumed = 0
    wanted = 30 if kind == "stream" else 20
    whole = time.monotonic()
    assert spawn(source, tmp_path / "time", kind) == 0
    whole = time.monotonic() - whole
    while kills < wanted:
        out = tmp_path / f"out-{rounds}"
        rounds += 1
        while True:
            journal = out.with_name(f".{out.name}.steelyard") / "journal.json"
            resumed += journal.exists()
            code = spawn(source, out, kind, kill_after=chance.uniform(0, whole))
            if code == 0:
                break
            if code == 1:  # it had ended, but for the last word, and was refused
                assert contents(out) == expected
                break
            assert code == -signal.SIGKILL
            kills += 1
            assert not out.exists() or contents(out) == expected
        assert contents(out) == expected
        assert contents(source) == before
    assert resumed > wanted // 5  # or nothing was shown


def spawn(source: Path, out: Path, kind: str, kill_after: float | None = None) -> int:
    process = start_forked(run, source, out, kind)
    process.join(kill_after)
    if process.is_alive():
        process.kill()
    process.join()
    assert process.exitcode is not None
    return process.exitcode


# -- disks that fail ----------------------------------------------------------------------------


@pytest.mark.parametrize("call", [0, 1, 3, 10, 30, 45])
def test_full_disk(
    call: int,
    source: Path,
    kind: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No room at the n-th write: the error says so, and the rest is done when there is room."""
    before, pwrite, calls = contents(source), os.pwrite, [0]

    def full(handle: int, data: Any, offset: int) -> int:
        calls[0] += len(data) > 8  # not the lock's
        if calls[0] > call and len(data) > 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(handle, data, offset)

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(CheckpointError, match=r"safetensors cannot be written: No space left"):
            run(source, out, kind)
    assert not out.exists()
    ends_well(source, out, kind, expected, before)


def test_short_reads_and_writes(
    source: Path,
    kind: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A disk may take or give less than was asked for, at every call."""
    preadv, pwrite = os.preadv, os.pwrite
    monkeypatch.setattr(os, "preadv", lambda f, b, o: preadv(f, [b[0][:1021]], o))
    monkeypatch.setattr(os, "pwrite", lambda f, d, o: pwrite(f, memoryview(d)[:1019], o))
    run(source, tmp_path / "out", kind)
    assert contents(tmp_path / "out") == expected


@pytest.mark.parametrize("call", [0, 3, 20, 35])
def test_unreadable_source(
    call: int,
    source: Path,
    kind: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before, preadv, calls = contents(source), os.preadv, [0]

    def broken(handle: int, buffers: Any, offset: int) -> int:
        if Path(f"/proc/self/fd/{handle}").readlink().parent == source.resolve():
            calls[0] += 1
            if calls[0] > call:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        return preadv(handle, buffers, offset)

    with monkeypatch.context() as patch:
        patch.setattr(os, "preadv", broken)
        with pytest.raises(CheckpointError, match="Input/output error"):
            run(source, tmp_path / "out", kind)
    ends_well(source, tmp_path / "out", kind, expected, before)


def test_disk_that_lies(
    source: Path, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A shard is read back when it is complete."""
    pwrite = os.pwrite

    def flipping(handle: int, data: Any, offset: int) -> int:
        wrong = bytearray(data)
        if len(wrong) > 1000 and offset > 300_000:
            wrong[500] ^= 4
        return pwrite(handle, wrong, offset)

    monkeypatch.setattr(os, "pwrite", flipping)
    with pytest.raises(CheckpointError, match="does not hold the bytes written to it"):
        run(source, tmp_path / "out", kind)
    assert not (tmp_path / "out").exists()


# -- runs that cannot be resumed ----------------------------------------------------------------


def stop_half_way(source: Path, out: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    with monkeypatch.context() as patch:
        stop_at_mark(patch, 3)
        with pytest.raises(Stop):
            run(source, out, kind)
    return out.with_name(f".{out.name}.steelyard")


def test_continues_where_it_was(
    source: Path,
    kind: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    out = tmp_path / "out"
    stop_half_way(source, out, kind, monkeypatch)
    result = run(source, out, kind)
    assert any("resumed after" in note for note in result.notes)
    assert contents(out) == expected
    planned = {p.name for p in result.plan.quantized}
    assert set(result.modules) == planned
    assert all(0 < m.error < 0.1 for m in result.modules.values())


def test_half_copied_file_is_copied_again(
    source: Path,
    kind: str,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk while the tokenizer is copied leaves part of it behind."""
    out = tmp_path / "out"

    def half(first: Path, second: Path) -> None:
        Path(second).write_bytes(Path(first).read_bytes()[:1])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("shutil.copyfile", half)
        with pytest.raises(CheckpointError, match=r"cannot be copied.*No space left"):
            run(source, out, kind)
    run(source, out, kind)
    assert contents(out) == expected


def test_more_tensors_than_a_header_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next shard begins in time, so that a run killed at that moment can go on."""
    inside = "block." * 130  # long names fill a header with fewer marks
    many = {f"model.layers.{i}.{inside}up_proj.weight": torch.ones(32, 32) for i in range(160)}
    (tmp_path / "m").mkdir()
    save_file(many, tmp_path / "m" / "model.safetensors")
    (tmp_path / "m" / "config.json").write_text("{}")
    recipe_ = QuantizationModifier(scheme="FP8_DYNAMIC")
    end = GrowingShards.end_current

    def dying(self: GrowingShards) -> None:
        end(self)
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr(CheckpointWriter, "mark_seconds", 0.0)
        patch.setattr(GrowingShards, "end_current", dying)
        with pytest.raises(Stop):
            oneshot(tmp_path / "m", recipe_, None, tmp_path / "q")
    assert (tmp_path / ".q.steelyard" / "journal.json").exists()
    oneshot(tmp_path / "m", recipe_, None, tmp_path / "q")
    oneshot(tmp_path / "m", recipe_, None, tmp_path / "whole")
    assert contents(tmp_path / "q") == contents(tmp_path / "whole")
    assert len(list((tmp_path / "q").glob("*.safetensors"))) > 1


def test_kept_run_is_not_erased_by_another(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stop_half_way(source, tmp_path / "out", kind, monkeypatch)
    with pytest.raises(CheckpointError, match=r"an unfinished run for .* is kept in"):
        oneshot(small_model("llama"), recipe("stream"), None, tmp_path / "out")
    assert (work / "journal.json").exists()


def test_source_that_links_into_the_output_is_safe(source: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "m").mkdir()
    for file in source.iterdir():
        (tmp_path / "m" / file.name).write_bytes(file.read_bytes())
    shard = sorted((tmp_path / "m").glob("*.safetensors"))[0]
    shard.rename(tmp_path / "out" / shard.name)
    shard.symlink_to(tmp_path / "out" / shard.name)
    with pytest.raises(CheckpointError, match="links into"):
        run(tmp_path / "m", tmp_path / "out", "stream", overwrite=True)
    assert shard.exists()


def test_emptied_output_is_no_success(source: Path, kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    process = os.fork()
    if process == 0:
        WorkFolder.close = lambda self, keep: os._exit(7)  # type: ignore[method-assign]
        run(source, out, kind)
        os._exit(1)
    os.waitpid(process, 0)
    for file in out.iterdir():
        file.unlink()
    with pytest.raises(CheckpointError, match="gone; start anew"):
        run(source, out, kind)


def test_changes_are_named(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for file in source.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    out = tmp_path / "out"
    stop_half_way(copy, out, kind, monkeypatch)

    with pytest.raises(CheckpointError, match=r"(?s)other inputs:.*recipe was.*resume=False"):
        other = QuantizationModifier(scheme="FP8_DYNAMIC", ignore=["lm_head"])
        if kind == "stream":
            oneshot(copy, other, None, out)
        else:
            other = recipe(kind).model_copy(update={"ignore": ["lm_head", "re:.*o_proj"]})
            oneshot(copy, QuantizationModifier(**other.model_dump()), token_batches(), out)
    with monkeypatch.context() as patch:
        patch.setattr(identity, "version", lambda name: "99")
        with pytest.raises(CheckpointError, match=r"version: steelyard was .*, and is 99"):
            run(copy, out, kind)
    shard = sorted(copy.glob("*.safetensors"))[1]
    raw = bytearray(shard.read_bytes())
    raw[-1] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(CheckpointError, match=f"source: {shard.name} was "):
        run(copy, out, kind)
    if kind == "layers":
        with pytest.raises(CheckpointError, match="calibration data was"):
            oneshot(copy, recipe(kind), token_batches(seed=5), out)
    run(copy, out, kind, resume=False)
    assert [p.name for p in sorted(tmp_path.iterdir())] == ["copy", "out"]


def test_part_that_was_changed_meanwhile(
    source: Path, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stop_half_way(source, tmp_path / "out", kind, monkeypatch)
    shard = sorted((work / "checkpoint").glob("*.safetensors"))[0]
    raw = bytearray(shard.read_bytes())
    raw[-100] ^= 1
    shard.write_bytes(raw)
    with pytest.raises(
        CheckpointError, match="was changed after the run stopped; start anew with resume=False"
    ):
        run(source, tmp_path / "out", kind)


@pytest.mark.parametrize("text", ["", "{", '{"format": 99}', "[]"])
def test_journal_that_cannot_be_read(
    text: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = stop_half_way(source, tmp_path / "out", "stream", monkeypatch)
    (work / "journal.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"journal\.json .*resume=False"):
        run(source, tmp_path / "out", "stream")


def test_two_runs_exclude_each_other(source: Path, tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "out")
    work.open()
    with pytest.raises(CheckpointError, match=f"another run .process {os.getpid()}. is writing"):
        run(source, tmp_path / "out", "stream")
    assert spawn(source, tmp_path / "out", "stream") == 1
    work.close(keep=False)
    assert spawn(source, tmp_path / "out", "stream") == 0


@pytest.mark.parametrize("can_exchange", [True, False])
def test_old_output_is_there_until_the_new_one_is(
    can_exchange: bool, source: Path, kind: str, tmp_path: Path
) -> None:
    """Killed as it is moved; without an exchange of folders, whoever comes next puts it right."""
    out = tmp_path / "out"
    out.mkdir()
    for name in ("config.json", "model.safetensors", "NOTICE"):
        (out / name).write_text("old")
    rename = Path.rename

    def dying(self: Path, target: Path) -> Path:
        if self.name == "checkpoint":
            os._exit(7)
        return rename(self, target)

    def child() -> None:
        Path.rename = dying  # type: ignore[method-assign,assignment]
        if not can_exchange:
            work_folder.exchange = lambda first, second: False
        run(source, out, kind, overwrite=True)

    process = os.fork()
    if process == 0:
        child()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert out.exists() == can_exchange
    if not can_exchange:  # the checkpoint waits for the command that made it
        other = "layers" if kind == "stream" else "stream"
        with pytest.raises(CheckpointError, match="started with other inputs"):
            run(source, tmp_path / "out", other, overwrite=True)
    run(source, out, kind, overwrite=True)
    assert not (out / "NOTICE").exists() and Shards(out)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_killed_between_the_last_rename_and_the_end(
    source: Path, kind: str, expected: dict[str, str], tmp_path: Path
) -> None:
    """The output is in place, so the same command has nothing to do but to clean up."""
    out = tmp_path / "out"
    process = os.fork()
    if process == 0:
        WorkFolder.close = lambda self, keep: os._exit(7)  # type: ignore[method-assign]
        run(source, out, kind)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert contents(out) == expected and (tmp_path / ".out.steelyard").exists()
    result = run(source, out, kind)
    assert result.output_dir == out and contents(out) == expected
    assert any("out is complete: an earlier run wrote it" in note for note in result.notes)
    assert {p.name for p in result.plan.quantized} == set(result.modules)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    with pytest.raises(CheckpointError, match="not empty"):
        run(source, out, kind)


def test_old_output_comes_back_if_the_new_one_is_given_up(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path / "out")
    work.open()
    work.old.mkdir()
    (work.old / "theirs").write_text("x")
    work.close(keep=True)
    again = WorkFolder(tmp_path / "out")
    again.open()
    again.clear()
    again.close(keep=False)
    assert (tmp_path / "out" / "theirs").read_text() == "x"


# -- experts without tokens ---------------------------------------------------------------------


def test_what_was_calibrated_is_kept_when_modules_saw_nothing(tmp_path: Path) -> None:
    """The error comes after hours; the choice it offers costs no more of them."""
    model = small_model("llama")
    model.save_pretrained(tmp_path / "m")
    calls = []

    unseen = Calibration.unseen
    wanted = "model.layers.1.mlp.down_proj"

    def pretend(self: Calibration) -> list[str]:
        calls.append(1)
        return [*unseen(self), *([wanted] if wanted in self.modules else [])]

    Calibration.unseen = pretend  # type: ignore[method-assign]
    try:
        with pytest.raises(CalibrationError, match=r"(?s)down_proj.*modules are kept"):
            run(tmp_path / "m", tmp_path / "out", "layers")
        count = len(calls)
        result = run(tmp_path / "m", tmp_path / "out", "layers", uncalibrated="weights-only")
    finally:
        Calibration.unseen = unseen  # type: ignore[method-assign]
    assert len(calls) == count  # no layer was calibrated again
    assert any("only their weights are quantized" in note for note in result.notes)
    with Shards(tmp_path / "out") as shards:
        assert f"{wanted}.weight_scale" in shards and f"{wanted}.input_scale" not in shards
        assert wanted.replace("1", "0") + ".input_scale" in shards
