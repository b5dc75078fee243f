"""The work folder is made by us, and never anybody else's; the output changes in one step."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from steelyard.checkpoint import CheckpointWriter, Shards
from steelyard.checkpoint import work_folder as module
from steelyard.checkpoint.exchange import exchange
from steelyard.checkpoint.work_folder import WorkFolder
from steelyard.errors import CheckpointError

IDENTITY = {"recipe": "r"}


def write(out: Path, value: float = 1.0, **options: Any) -> bool:
    """Write a checkpoint; return whether it was there already."""
    options = {"identity": IDENTITY | {"value": value}} | options
    with CheckpointWriter(out, **options) as writer:
        was_there = writer.finished
        if not was_there:
            if "x" not in writer:
                writer.add("x", torch.full((2,), value))
            writer.finish({"model_type": "llama"})
        return was_there


def value_in(out: Path) -> float:
    with Shards(out) as shards:
        return float(shards.read("x")[0])


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "data").write_text("mine")
    (folder / "lock").write_text("12345")
    return folder


# -- what is not ours -----------------------------------------------------------------------------


def test_link_is_not_followed(tmp_path: Path, theirs: Path) -> None:
    (tmp_path / ".out.steelyard").symlink_to(theirs)
    for resume in (True, False):
        with pytest.raises(CheckpointError, match="is a link or a file"):
            write(tmp_path / "out", resume=resume)
    assert {p.name: p.read_text() for p in theirs.iterdir()} == {"data": "mine", "lock": "12345"}


@pytest.mark.parametrize("name", ["lock", "journal.json", "checkpoint", "old"])
def test_link_inside_is_not_followed(name: str, tmp_path: Path, theirs: Path) -> None:
    work = tmp_path / ".out.steelyard"
    work.mkdir()
    (work / "lock").write_text("")
    target = theirs if name in ("checkpoint", "old") else theirs / "data"
    (work / name).unlink(missing_ok=True)
    (work / name).symlink_to(target)
    with pytest.raises(CheckpointError, match=f"holds the link {name}"):
        write(tmp_path / "out")
    assert (theirs / "data").read_text() == "mine"


@pytest.mark.parametrize("how", ["text", "hard link", "folder", "pipe"])
def test_lock_that_is_none_is_not_written_to(how: str, tmp_path: Path, theirs: Path) -> None:
    work = tmp_path / ".out.steelyard"
    work.mkdir()
    if how == "text":
        (work / "lock").write_text("the combination is 12-34-56")
    elif how == "hard link":
        os.link(theirs / "lock", work / "lock")
    elif how == "folder":
        (work / "lock").mkdir()
    else:
        os.mkfifo(work / "lock")
    with pytest.raises(CheckpointError):
        write(tmp_path / "out")
    assert (theirs / "lock").read_text() == "12345"
    assert how != "text" or (work / "lock").read_text() == "the combination is 12-34-56"


def test_folder_of_somebody_else_is_not_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    work = tmp_path / ".out.steelyard"
    work.mkdir()
    (work / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match=r"holds thesis\.tex and no lock"):
        write(tmp_path / "out", resume=False)
    (work / "thesis.tex").unlink()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(CheckpointError, match="belongs to another user"):
            write(tmp_path / "out")
    write(tmp_path / "out")  # an empty one is what a run leaves that was killed at once
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


def test_others_cannot_write_there(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        work = WorkFolder(tmp_path / "out")
        work.open()
        assert work.path.stat().st_mode & 0o777 == 0o700
        work.close(keep=False)
        write(tmp_path / "out")
    finally:
        os.umask(before)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777  # the output is as umask says


# -- killed at the last steps ---------------------------------------------------------------------

OPERATIONS = ("rename", "unlink", "rmdir", "mkdir", "replace")


def killed_at(patch: pytest.MonkeyPatch, wanted: int, after: bool = False) -> None:
    """Let this process end at, or right after, a change of a name, counted from the last mark.

    That mark is the one which says that the output is complete.
    """
    counted = [-1]

    def dying(kind: str, real: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if counted[0] >= 0:
                if counted[0] == wanted and not after:
                    os._exit(7)
                counted[0] += 1
            found = real(*args, **options)
            if counted[0] == wanted + 1 and after:
                os._exit(7)
            return found

        return call

    for kind in OPERATIONS:
        patch.setattr(os, kind, dying(kind, getattr(os, kind)))
    real_exchange = module.exchange
    patch.setattr(module, "exchange", dying("exchange", real_exchange))
    record = WorkFolder.record

    def recorded(self: WorkFolder, content: dict[str, Any], rank: int = 0) -> None:
        record(self, content, rank)
        if content["complete"]:
            counted[0] = 0

    patch.setattr(WorkFolder, "record", recorded)


def kills(out: Path, patch: pytest.MonkeyPatch, **options: Any) -> Iterator[tuple[int, bool]]:
    """Yield after each kill of a run in a process of its own; end with the run that survives."""
    for wanted in range(40):
        for after in (False, True):
            process = os.fork()
            if process == 0:
                try:
                    killed_at(patch, wanted, after)
                    write(out, **options)
                    os._exit(0)
                finally:
                    os._exit(1)
            code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
            assert code in (0, 7)
            if code == 0:
                return
            yield wanted, after
    raise AssertionError("the run never ended")


def clean(out: Path) -> None:
    for path in sorted(out.parent.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("overwrite", [False, True])
def test_rerun_of_what_is_complete(
    overwrite: bool, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whenever it is killed: the old or the new is in place, and the same command ends well."""
    if not can_exchange:
        monkeypatch.setattr(module, "exchange", lambda first, second: False)
    out, count, absent = tmp_path / "out", 0, 0
    before = [write(out)] if overwrite else []
    with monkeypatch.context() as patch:
        for at in kills(out, patch, value=2.0, overwrite=overwrite):
            count += 1
            there = out.exists()
            absent += not there
            was_new = there and value_in(out) == 2.0
            leftover = [p.name for p in tmp_path.iterdir() if p != out]
            if leftover or not there:
                assert write(out, 2.0, overwrite=overwrite) == was_new, at
            assert value_in(out) == 2.0
            assert [p.name for p in tmp_path.iterdir()] == ["out"], at
            clean(out)
            if before:
                write(out)
    assert count > 8
    assert absent == 0 or not (overwrite and can_exchange)


def test_other_run_after_a_kill_is_refused_and_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is complete is complete for the run that wrote it, not for another."""
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        for _ in kills(out, patch, value=2.0):
            if out.exists():
                with pytest.raises(CheckpointError):
                    write(out, 3.0)
                assert value_in(out) == 2.0
            write(out, 3.0, resume=False, overwrite=True)
            assert value_in(out) == 3.0
            assert [p.name for p in tmp_path.iterdir()] == ["out"]
            clean(out)


@pytest.mark.parametrize("can_exchange", [True, False])
@pytest.mark.parametrize("overwrite", [False, True])
def test_run_that_cannot_resume_leaves_nothing_to_the_next(
    overwrite: bool, can_exchange: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loaded module: its output is called complete, and the leftover is removed."""
    if not can_exchange:
        monkeypatch.setattr(module, "exchange", lambda first, second: False)
    out, complete = tmp_path / "out", 0
    if overwrite:
        write(out)
    with monkeypatch.context() as patch:
        for at in kills(out, patch, value=2.0, overwrite=overwrite, identity=None):
            leftover = [p.name for p in tmp_path.iterdir() if p != out]
            if out.exists() and value_in(out) == 2.0 and leftover:
                with pytest.raises(CheckpointError) as caught:
                    write(out, 3.0, identity=None)
                complete += "is complete: an earlier run wrote it" in str(caught.value)
                assert "overwrite=True" in str(caught.value), at
                assert [p.name for p in tmp_path.iterdir()] == ["out"], at
            elif overwrite:  # the old output is in place, or is put back
                with pytest.raises(CheckpointError, match=r"is not empty.*overwrite=True"):
                    write(out, 3.0, identity=None)
                assert [p.name for p in tmp_path.iterdir()] == ["out"], at
            for identity in (None, IDENTITY):
                write(out, 3.0, identity=identity, overwrite=True)
                assert value_in(out) == 3.0
                assert [p.name for p in tmp_path.iterdir()] == ["out"], at
            clean(out)
            if overwrite:
                write(out)
    assert complete > 3


def test_other_command_after_a_kill_may_replace_what_is_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, complete = tmp_path / "out", 0
    with monkeypatch.context() as patch:
        for at in kills(out, patch, value=2.0):
            if out.exists() and (tmp_path / ".out.steelyard" / "journal.json").exists():
                complete += 1
                write(out, 3.0, overwrite=True)
                assert value_in(out) == 3.0
                assert [p.name for p in tmp_path.iterdir()] == ["out"], at
            clean(out)
    assert complete


def test_same_bytes_in_place_are_no_proof_that_it_was_moved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old output has the same weights: the new folder is moved all the same."""
    out = tmp_path / "out"
    write(out)
    (out / "tokenizer.json").write_text("old")
    process = os.fork()
    if process == 0:
        killed_at(monkeypatch, 0)
        write(out, overwrite=True)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 7
    assert (out / "tokenizer.json").exists()
    assert not write(out, overwrite=True)
    assert not (out / "tokenizer.json").exists()


@pytest.mark.parametrize("resume", [True, False])
def test_file_by_the_name_of_the_last_journal_is_kept(resume: bool, tmp_path: Path) -> None:
    theirs = tmp_path / ".out.steelyard-done"
    theirs.write_text("mine")
    write(tmp_path / "out", resume=resume)
    assert theirs.read_text() == "mine"
    theirs.unlink()
    theirs.mkdir()
    write(tmp_path / "out", overwrite=True, resume=resume)
    assert sorted(p.name for p in tmp_path.iterdir()) == [theirs.name, "out"]


def test_exchange(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text(json.dumps(name))
    if not exchange(tmp_path / "a", tmp_path / "b"):
        pytest.skip("this system cannot")
    assert (tmp_path / "a" / "file").read_text() == '"b"'
    with pytest.raises(FileNotFoundError):
        exchange(tmp_path / "a", tmp_path / "none")
