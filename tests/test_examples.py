"""Every script in examples/ runs and prints what the file beside it says.

Words and whole numbers must be equal. A number with a fraction may differ by a quarter, since it
depends on the processor and on the texts of the running Python; a time may be anything.
"""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from commands import environment_with
from families import assert_same_tensors
from pages import own_registrations

FOLDER = Path(__file__).parent.parent / "examples"
SCRIPTS = sorted(FOLDER.glob("*.py"))
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
TIME = re.compile(r"\d+(?:\.\d+)? s\b")


def assert_same_output(found: str, expected: str, tolerance: float = 0.25) -> None:
    texts = [TIME.sub("TIME", text).rstrip() for text in (found, expected)]
    words = [re.sub(r"\s+", " ", NUMBER.sub("#", text)) for text in texts]
    assert words[0] == words[1]
    for one, other in zip(*map(NUMBER.findall, texts), strict=True):
        if "." in other:
            assert float(one) == pytest.approx(float(other), rel=tolerance, abs=0.001), found
        else:
            assert one == other, found


def printed(path: Path, capsys: pytest.CaptureFixture[str], folder: Path) -> str:
    with own_registrations():
        runpy.run_path(str(path), run_name="__main__")
    return capsys.readouterr().out.replace(f"{folder.resolve()}/", "")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_example_prints_what_the_file_says(
    path: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    found = printed(path, capsys, tmp_path)
    assert_same_output(found, path.with_suffix(".txt").read_text(encoding="utf-8"))


def test_every_example_is_listed() -> None:
    listed = re.findall(r"\[`(\w+)\.py`\]\((\w+)\.py\)", (FOLDER / "README.md").read_text())
    assert all(shown == target for shown, target in listed)
    assert sorted(name for name, _ in listed) == [path.stem for path in SCRIPTS]


def test_two_processes_write_what_one_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = FOLDER / "several_processes.py"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    (tmp_path / "two").mkdir()
    subprocess.run(
        [*command, "--nproc-per-node", "2", str(path)],
        cwd=tmp_path / "two",
        env=environment_with(),
        check=True,
        capture_output=True,
    )
    monkeypatch.chdir(tmp_path)
    printed(path, capsys, tmp_path)
    assert_same_tensors(tmp_path / "two" / "by-all-processes", tmp_path / "by-all-processes")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ("21 modules", "22 modules"),
        ("KL 0.9", "KL 0.5"),
        ("in 3.0 s: done", "in 9.1 s: failed"),
        ("one\ntwo", "one"),
    ],
)
def test_the_check_can_fail(found: str, expected: str) -> None:
    assert_same_output(found, found)
    with pytest.raises((AssertionError, ValueError)):
        assert_same_output(found, expected)
