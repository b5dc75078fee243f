"""Help answers without torch, and every example in it runs."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from commands import Command, environment_with

from steelyard.cli.app import COMMANDS

NAMES = [command.__name__ for command in COMMANDS]
HEAVY = ("torch", "transformers", "compressed_tensors", "numpy")
EXAMPLE = re.compile(r"^\s*(steelyard .*)$", re.MULTILINE)


def ran_with(arguments: list[str]) -> tuple[str, list[str]]:
    """Run a command in a process of its own; return its output, its code and what it imported."""
    code = (
        "import sys\n"
        "from steelyard.cli.app import run\n"
        f"code = run({arguments!r})\n"
        f"print(code, *sys.modules.keys() & set({HEAVY!r}), file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env=environment_with(),
        check=True,
    )
    *said, last = done.stderr.splitlines()
    return done.stdout + "\n".join(said), last.split()


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], *([n, "-h"] for n in NAMES)])
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    said, code_and_imports = ran_with(arguments)
    assert code_and_imports == ["0"]
    assert said.strip()


@pytest.mark.parametrize(
    "command", ["quantize M -o q --scheme FP8", "observe M -o q", "evaluate M M"]
)
def test_a_missing_data_file_is_refused_before_anything_heavy_is_imported(
    command: str, tmp_path: Path
) -> None:
    words = [str(tmp_path) if word == "M" else word for word in command.split()]
    said, code_and_imports = ran_with([*words, "--data", str(tmp_path / "none.txt")])
    assert code_and_imports == ["1"]
    assert said.startswith("error: there is no file")


def test_help_lists_every_command_with_a_whole_sentence(steelyard: Command) -> None:
    answer = steelyard("--help")
    for name in NAMES:
        line = re.search(rf"^  {name} +(.*)$", answer.out, re.MULTILINE)
        assert line is not None and line[1].endswith("."), name
        assert "..." not in line[1], name
    assert re.search(r"^ +2 +the request is invalid", answer.out, re.MULTILINE)
    assert "--install-completion" in answer.out


def test_no_command_is_help_and_a_usage_error(steelyard: Command) -> None:
    answer = steelyard()
    assert answer.code == 2
    assert answer.out == steelyard("--help").out


def examples(steelyard: Command, name: str) -> list[str]:
    found = EXAMPLE.findall(steelyard(*([name] if name else []), "--help").out)
    left = ("steelyard demo", "steelyard sign")  # takes minutes; needs keys and another package
    return [line for line in found if not line.strip().startswith(left)]


def exists(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@pytest.mark.parametrize("name", NAMES)
def test_every_command_has_an_example(name: str, steelyard: Command) -> None:
    found = EXAMPLE.findall(steelyard(name, "--help").out)
    assert found and all(line.startswith(f"steelyard {name} ") or name == "demo" for line in found)


def test_examples_run(steelyard: Command, workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the help, so that one may use what another wrote."""
    monkeypatch.chdir(workplace)
    names = ["", *NAMES]
    if not exists("steelyard.evaluate"):
        names.remove("evaluate")
    ran = 0
    for name in names:
        for line in examples(steelyard, name):
            if "more.safetensors" in line:
                more = examples(steelyard, "observe")[0].replace("statistics.", "more.")
                more = more.replace("calibration.txt", "held-out.txt")
                assert steelyard(*shlex.split(more)[1:]).code == 0
            answer = steelyard(*shlex.split(line)[1:])
            assert answer.code == 0, (line, answer.err)
            assert answer.out.strip(), line
            ran += 1
    assert ran >= 14
