"""demo: nothing is replaced but what an earlier demo wrote, or a checkpoint where asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
from commands import Command

from steelyard.cli import demo
from steelyard.report import Report, write_files

LIMITS = ("--samples", 1, "--max-seq-length", 8)


@pytest.fixture(autouse=True)
def one_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo with one of its checkpoints; twelve take a minute."""
    first = demo.ways()[0]
    monkeypatch.setattr(demo, "ways", lambda: [first])


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    def work(*args: object) -> None:
        raise AssertionError("it began")

    monkeypatch.setattr(demo, "_run", work)


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.filterwarnings("ignore")
def test_own_output_is_replaced_and_the_user_s_is_not(steelyard: Command, tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    for _ in range(2):
        answer = steelyard("demo", "-o", folder, *LIMITS)
        assert answer.code == 0, answer.err
    place = folder / demo.ways()[0].name
    (place / "thesis.tex").write_text("mine")
    before = contents(folder)
    for more in ((), ("--overwrite",)):
        answer = steelyard("demo", "-o", folder, *LIMITS, *more)
        assert answer.code == 1 and "holds thesis.tex, not part of a checkpoint" in answer.err
    assert contents(folder) == before


@pytest.mark.usefixtures("no_work")
def test_checkpoint_of_somebody_else_needs_overwrite(steelyard: Command, tmp_path: Path) -> None:
    place = tmp_path / demo.ways()[0].name
    write_files(Report(title="mine"), place)
    for name in ("config.json", "model.safetensors"):
        (place / name).write_text("{}")
    before = contents(tmp_path)
    answer = steelyard("demo", "-o", tmp_path)
    assert answer.code == 1
    assert "is not empty; choose another folder, or replace what it holds with --overwrite" in (
        answer.err
    )
    assert "it began" in steelyard("demo", "-o", tmp_path, "--overwrite").err
    assert contents(tmp_path) == before


@pytest.mark.usefixtures("no_work")
@pytest.mark.parametrize("name", ["report.json", "report.html"])
def test_report_of_somebody_else_is_kept(name: str, steelyard: Command, tmp_path: Path) -> None:
    (tmp_path / name).write_text("mine")
    for more in ((), ("--overwrite",)):
        answer = steelyard("demo", "-o", tmp_path, *more)
        assert answer.code == 1 and f"{name} exists and holds no report of a demo" in answer.err
    assert contents(tmp_path) == {name: b"mine"}
