"""Single files: whole or as they were, and never in the place of anything else."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from steelyard.atomic_file import FileKind, write_atomic
from steelyard.errors import OutputError, StatisticsError


def is_note(path: Path) -> bool:
    return path.read_bytes().startswith(b"note: ")


NOTE = FileKind("notes", is_note, StatisticsError)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_new_own_and_empty_files_are_written(tmp_path: Path) -> None:
    path = tmp_path / "a note"
    NOTE.write(path, b"note: one")
    NOTE.write(str(path), b"note: two")
    assert path.read_bytes() == b"note: two"
    (tmp_path / "empty").touch()  # as mktemp makes it
    NOTE.write(tmp_path / "empty", b"note: three")
    assert names(tmp_path) == ["a note", "empty"]


@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002])
def test_mode_is_that_of_a_new_file(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        write_atomic(tmp_path / "x", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "x").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("folder", "is a folder; the notes are saved in one file"),
        ("theirs", "exists and holds no notes of Steelyard, so it is not replaced"),
        ("unreadable", "exists and holds no notes"),
        ("link", "is a link, which is not followed"),
        ("dangling", "is a link"),
        ("pipe", "is a pipe"),
        ("none/x", "none is not a folder, so x cannot be saved in it"),
        ("theirs/x", "theirs is not a folder"),
        ("x" * 300, "cannot be used for the notes: File name too long"),
    ],
)
def test_place_that_may_not_be_written(
    given: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    for name in ("theirs", "unreadable"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "own").write_text("note: ")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "dangling").symlink_to("absent")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for act in (NOTE.check_place, lambda path: NOTE.write(path, b"note: new")):
        with pytest.raises(StatisticsError, match=message):
            act(given)
    assert names(tmp_path) == before
    assert (tmp_path / "theirs").read_text() == "mine"
    assert (tmp_path / "own").read_text() == "note: "


def test_folder_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # the tests may run as root
    with pytest.raises(StatisticsError, match="may write to, so x cannot be saved"):
        NOTE.check_place(tmp_path / "x")


@pytest.mark.parametrize(
    ("call", "number"), [("write", errno.ENOSPC), ("fsync", errno.EIO), ("replace", errno.EROFS)]
)
def test_failure_leaves_the_old_file_and_nothing_else(
    call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    NOTE.write(tmp_path / "x", b"note: old")
    said = os.strerror(number)

    def failing(*args: Any) -> None:
        raise OSError(number, said)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises(OutputError, match=f"x cannot be written: {said}; .* same command again"):
        NOTE.write(tmp_path / "x", b"note: new")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"note: old"


def test_short_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, content = os.write, bytes(range(256)) * 20
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, data[:7]))
    write_atomic(tmp_path / "x", content)
    assert (tmp_path / "x").read_bytes() == content


# -- killed -------------------------------------------------------------------------------------


def hang(path: Path, started: Any) -> None:
    def hanging(*args: Any) -> None:
        started.set()
        signal.pause()

    os.fsync = hanging
    NOTE.write(path, b"note: never")


def test_leftovers_of_killed_runs_are_removed_and_those_of_others_kept(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    started = context.Event()
    path = tmp_path / "x[1]"
    process = context.Process(target=hang, args=(path, started))
    process.start()
    assert started.wait(30)
    partial = f".x[1].{process.pid}.partial"
    others = [".x[1].mine.partial", ".y.1.partial"]
    for name in others:
        (tmp_path / name).touch()
    NOTE.check_place(path)
    assert names(tmp_path) == sorted([partial, *others])  # it is being written
    process.kill()
    process.join()
    assert partial in names(tmp_path)
    NOTE.check_place(path)
    assert names(tmp_path) == sorted(others)
    (tmp_path / f".x[1].{os.getpid()}.partial").touch()
    NOTE.write(path, b"note: at last")
    assert names(tmp_path) == sorted([path.name, *others])


def test_no_file_that_a_server_would_take_for_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(StatisticsError, match=r"a server would load x\.safetensors with its weigh"):
        NOTE.write(tmp_path / "x.safetensors", b"note: one")
    NOTE.write(tmp_path / "x.note", b"note: one")
    assert names(tmp_path) == ["config.json", "x.note"]
