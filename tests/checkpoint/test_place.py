"""Where a checkpoint may go: nothing is replaced but a checkpoint, and never what lies around."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from steelyard.checkpoint import CheckpointWriter, Shards
from steelyard.errors import CheckpointError


def write(folder: Path | str, overwrite: bool = False, value: float = 1.0) -> Path:
    with CheckpointWriter(folder, overwrite=overwrite) as writer:
        writer.add("x", torch.full((2,), value))
        return writer.finish({"model_type": "llama"})


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "home" / "me" / "here"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("given", ["", "  "])
def test_empty_path_is_refused(here: Path, given: str) -> None:
    (here / "thesis.tex").write_text("mine")
    with pytest.raises(CheckpointError, match="empty text"):
        CheckpointWriter(given, overwrite=True)
    assert contents(here) == {"thesis.tex": b"mine"}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (".", "is the current folder"),
        ("/", "is the root folder"),
        ("..", "contains the current folder"),
        ("../..", "contains the current folder"),
        (".out.steelyard", "folders of unfinished runs"),
        (".out.steelyard/checkpoint", "folders of unfinished runs"),
        (".out.steelyard-done", "folders of unfinished runs"),
    ],
)
def test_folder_that_is_never_an_output(here: Path, output: str, message: str) -> None:
    for overwrite in (True, False):
        with pytest.raises(CheckpointError, match=message):
            CheckpointWriter(output, overwrite=overwrite)


def test_home_is_never_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write(tmp_path / "a" / "home")  # which even looks like a checkpoint
    monkeypatch.setenv("HOME", str(home))
    with pytest.raises(CheckpointError, match="is the home folder"):
        CheckpointWriter(home, overwrite=True)
    with pytest.raises(CheckpointError, match="contains the home folder"):
        CheckpointWriter(home.parent, overwrite=True)


FOREIGN = ["thesis.tex", "data.csv", "notes.txt", "run.py", ".git/HEAD", "checkpoint-500/x.bin"]


@pytest.mark.parametrize("name", [*FOREIGN, "chat_templates/data.csv", ".cache/mine"])
def test_files_of_the_user_are_not_replaced(name: str, tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    (out / name).parent.mkdir(exist_ok=True)
    (out / name).write_text("mine")
    before = contents(out)
    shown = "chat_templates/data.csv" if name.startswith("chat") else name
    shown = shown if shown.startswith(("chat", ".cache")) else name.split("/")[0]
    for overwrite in (True, False):
        with pytest.raises(CheckpointError, match=f"holds {shown}, not part of a checkpoint"):
            write(out, overwrite)
    assert contents(out) == before
    assert [p.name for p in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
def test_folder_without_config_or_weights_is_no_checkpoint(name: str, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).write_text("{}")
    with pytest.raises(CheckpointError, match="not a checkpoint"):
        write(tmp_path / "out", overwrite=True)
    assert contents(tmp_path / "out") == {name: b"{}"}


def test_checkpoint_with_all_that_models_have_is_replaced(tmp_path: Path) -> None:
    out = write(tmp_path / "out")
    for name in (
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
        "merges.txt",
        "vocab.json",
        "chat_template.jinja",
        "chat_templates/tools.jinja",
        "generation_config.json",
        "preprocessor_config.json",
        "modeling_x.py",
        "README.md",
        "LICENSE",
        "LICENSE.txt",
        ".gitattributes",
        ".cache/huggingface/download/config.json.metadata",
        "recipe.yaml",
        "report.json",
        "report.html",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        (out / name).write_text("{}")
    write(out, overwrite=True, value=2.0)
    assert sorted(contents(out)) == ["config.json", "model.safetensors", "provenance.json"]
    with Shards(out) as shards:
        assert shards.read("x").tolist() == [2.0, 2.0]


def test_folder_of_another_disk_is_foreign(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = write(tmp_path / "out")
    (out / "chat_templates").mkdir()
    lstat = Path.lstat

    def elsewhere(self: Path) -> os.stat_result:
        found = lstat(self)
        if self.name != "chat_templates":
            return found
        return os.stat_result((*found[:2], found.st_dev + 1, *found[3:10]))

    monkeypatch.setattr(Path, "lstat", elsewhere)
    with pytest.raises(CheckpointError, match="holds chat_templates"):
        write(out, overwrite=True)


def test_files_that_a_run_copied_go_with_its_checkpoint(here: Path) -> None:
    """Whatever their names: a source may bring pictures, or a folder with its original weights."""
    with CheckpointWriter("out") as writer:
        writer.add("x", torch.ones(2))
        writer.write_text("original/how.txt", "copied")
        writer.write_text("picture.svg", "copied")
        out = writer.finish({"model_type": "llama"})
    write("out", overwrite=True)
    assert not (out / "original").exists()
    with CheckpointWriter("out", overwrite=True) as writer:
        writer.add("x", torch.ones(2))
        writer.write_text("original/how.txt", "copied")
        writer.finish({"model_type": "llama"})
    (out / "original" / "how.txt").write_text("changed since")
    with pytest.raises(CheckpointError, match="holds original, not part of a checkpoint"):
        write("out", overwrite=True)
    assert (out / "original" / "how.txt").read_text() == "changed since"
