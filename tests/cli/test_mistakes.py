"""Mistakes: one line, a remedy, and an exit code; a stack trace only where it is asked for."""

from __future__ import annotations

import ast
import errno
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from commands import Command

from steelyard.cli.app import build
from steelyard.cli.mistakes import ARGUMENTS, WORDS, explain, in_options
from steelyard.entry import oneshot as run_oneshot
from steelyard.errors import SteelyardError
from steelyard.evaluate import evaluate

SOURCE = Path(__file__).parents[2] / "src" / "steelyard"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("quantise M", "there is no command 'quantise': did you mean 'quantize'?"),
        ("quantize M --shceme W4A16", "there is no option --shceme: did you mean '--scheme'?"),
        ("quantize M --scheme W4A61 -o q", "there is no scheme 'W4A61': did you mean 'W4A16'?"),
        (
            "quantize M --scheme W8A8 --observer optimum -o q",
            "there is no observer 'optimum': did you mean 'optimal'?",
        ),
        (
            "quantize M --scheme W8A8 --pipeline sequental -o q",
            "there is no pipeline 'sequental': did you mean 'sequential'?",
        ),
        (
            "quantize M --scheme W8A8 --uncalibrated weights -o q",
            "there is no choice 'weights': did you mean 'weights-only'?",
        ),
        ("quantize M -o q", "one of --scheme and --recipe is missing, such as --scheme W4A16"),
        ("quantize M --scheme W8A8", "-o is missing: where should the checkpoint go?"),
        (
            "quantize M --scheme W8A8 --recipe r.yaml -o q",
            "--scheme and --recipe exclude each other: write it into the recipe",
        ),
        (
            "quantize M --recipe r.yaml --gptq -o q",
            "--gptq and --recipe exclude each other: write it into the recipe",
        ),
        ("quantize M --recipe r.yaml -o q", "there is no recipe file r.yaml"),
        (
            "quantize M --recipe r.yaml --bits 4.5 -o q",
            "--bits and --recipe exclude each other: write it into the recipe",
        ),
        ("quantize M --bits 4.5 --max-kl 0.1 -o q", "--bits and --max-kl exclude each other"),
        ("quantize M --bit-widths 4,8 -o q", "--bit-widths needs --bits or --max-kl"),
        ("quantize M --bits 4.5 --bit-widths 4;8 -o q", "'4;8' is no list of numbers"),
        ("quantize M --bits 4.5 --bit-widths 4,9 -o q", "9 is not 2 to 8, or 16 for unquantized"),
        (
            "quantize M --bits 3.5 -o q",
            "3.5 bits per weight are fewer than the 4 of the smallest schemes: allow more bits, or "
            "start from a scheme with fewer, such as --num-bits 3",
        ),
        ("quantize M --bits 16 -o q", "leave nothing to choose: the largest schemes take 16"),
        ("quantize M --bits 4.5 --gptq -o q", "--data is missing: static activations"),
        ("quantize M --scheme FP8 -o q", "--data is missing: static activations"),
        ("quantize M --scheme W8A8 --gptq -o q", "--data is missing: static activations"),
        (
            "quantize M --scheme FP8 --data a --statistics b -o q",
            "--statistics and --data exclude each other",
        ),
        ("quantize M --scheme W8A8 -o q --samples 0", "--samples: "),
        ("quantize M --scheme W8A8 -o q --samples many", "--samples: "),
        ("quantize ./nothing --scheme W8A8 -o q", "there is no folder './nothing'"),
        ("quantize M/config.json --scheme W8A8 -o q", "is a file; give its folder"),
        ("quantize", "missing argument"),
        ("quantize M --scheme", "requires an argument"),
        ("quantize M --scheme W4A16 --targets re:.*w1 -o q", "matches no module"),
        ("inspect M --filter nothing", "matches 'nothing'"),
        ("inspect M --filter re:(", "'re:(' is not a regular expression"),
        ("compare M --schemes W9A9", "there is no scheme 'W9A9'"),
        ("compare M --observers , --schemes W8A8", "name at least one observer and one scheme"),
        ("compare M --observers imatrix_mse", "weights columns by calibration data"),
        ("compare M --report nowhere/r.json", "there is no folder nowhere for the report"),
        ("compare M --filter nothing", "is left to compare"),
        ("merge nothing -o x", "there is no file nothing"),
        ("merge x", "missing option"),
        ("ls scheme", "there is no list 'scheme': did you mean 'schemes'?"),
    ],
)
def test_usage_errors(
    arguments: str,
    said: str,
    steelyard: Command,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = steelyard(*arguments.replace("M", str(model), 1).split(" "))
    assert answer.code == 2, answer
    assert answer.out == ""
    assert answer.err.startswith("error: ")
    assert said in answer.err
    assert "Traceback" not in answer.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "command",
    [
        ("quantize", "M", "--scheme", "W8A8", "--overwrite", "-o"),
        ("observe", "M", "--scheme", "FP8", "--data", "x.txt", "-o"),
        ("merge", "a.safetensors", "-o"),
        ("compare", "M", "--report"),
        ("demo", "-o"),
    ],
)
def test_empty_output_is_refused(
    command: tuple[str, ...],
    steelyard: Command,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As an unset variable of a shell gives it; it must not be the current folder."""
    monkeypatch.chdir(tmp_path)
    Path("thesis.tex").write_text("mine")
    answer = steelyard(*[model if each == "M" else each for each in command], "")
    assert (answer.code, answer.out) == (2, "")
    assert "the output path is empty" in answer.err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


def test_failures_in_data_and_checkpoints(
    steelyard: Command, model: Path, workplace: Path, tmp_path: Path
) -> None:
    full, old, empty = tmp_path / "full", tmp_path / "old", tmp_path / "empty"
    for folder in (full, old, empty):
        folder.mkdir()
    (full / "file").write_text("mine")
    for name in ("config.json", "model.safetensors"):
        (old / name).write_text("{}")
    for arguments, said in (
        (("quantize", model, "-o", old, "--scheme", "W8A8"), "its contents with --overwrite"),
        (
            ("quantize", model, "-o", full, "--scheme", "W8A8", "--overwrite"),
            "not replaced, even with --overwrite",
        ),
        (
            ("quantize", model, "-o", model, "--scheme", "W8A8", "--overwrite"),
            "is the source itself",
        ),
        (("inspect", empty), "holds no *.safetensors"),
        (("quantize", empty, "-o", tmp_path / "q", "--scheme", "W8A8"), "is this the folder of"),
        (
            ("quantize", model, "-o", tmp_path / "q", "--scheme", "FP8", "--data", "none.txt"),
            "there is no file 'none.txt'",
        ),
    ):
        answer = steelyard(*arguments)
        assert answer.code == 1, answer
        last = answer.err.splitlines()[-1]
        assert last.startswith("error: ") and said in last
        assert "Traceback" not in answer.err


def test_group_size_that_does_not_divide_is_said_once_for_a_width(
    steelyard: Command, model: Path, tmp_path: Path
) -> None:
    options = ("--scheme", "W4A16", "--group-size", 96)
    answer = steelyard("quantize", model, "-o", tmp_path / "q", *options)
    assert answer.code == 2
    lines = answer.err.splitlines()
    assert lines[0] == "error: the recipe does not fit the model, and nothing was done:"
    assert [line.split()[1:3] for line in lines[1:]] == [["3", "modules"], ["18", "modules"]]
    assert all("use --group-size 128 (or 64, 32, 16), which divides" in line for line in lines[1:])
    dry = steelyard("quantize", model, *options, "--dry-run")
    assert dry.code == 2 and "use --group-size 128" in dry.out and "group_size" not in dry.out


def test_mistyped_ignore_names_the_option(steelyard: Command, model: Path, tmp_path: Path) -> None:
    options = ("--scheme", "W8A8", "--ignore", "lm_head", "--ignore", "re:.*mplp.*")
    answer = steelyard("quantize", model, "-o", tmp_path / "q", *options)
    assert answer.code == 2 and not (tmp_path / "q").exists()
    assert "'re:.*mplp.*' of --ignore matches no module" in answer.err


def _messages() -> Iterator[tuple[str, str]]:
    """Yield every text of the package that is no docstring, with {} for what is filled in."""
    for path in SOURCE.rglob("*.py"):
        if "cli" in path.parts or path.stem in ("aliases", "script_tools"):  # Python alone
            continue
        tree = ast.parse(path.read_text("utf-8"))
        inner = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}  # docstrings
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                inner.update(map(id, node.values))
                parts = [v.value if isinstance(v, ast.Constant) else "{}" for v in node.values]
                yield f"{path.name}:{node.lineno}", "".join(map(str, parts))
            elif isinstance(node, ast.Constant) and id(node) not in inner:
                yield f"{path.name}:{node.lineno}", str(node.value)


def _given_by_commands(function: str) -> set[str]:
    """Return the arguments that commands pass to a function; messages may name the others."""
    trees = [ast.parse(path.read_text("utf-8")) for path in (SOURCE / "cli").glob("*.py")]
    calls = [n for tree in trees for n in ast.walk(tree) if isinstance(n, ast.Call)]
    found = [c for c in calls if isinstance(c.func, ast.Name) and c.func.id == function]
    return {keyword.arg for call in found for keyword in call.keywords if keyword.arg}


def test_no_message_speaks_of_python_arguments() -> None:
    names = {*_given_by_commands("oneshot"), "model", "recipe", "dataset", "output_dir"}
    assert names < set(inspect.signature(run_oneshot).parameters)
    names |= set(inspect.signature(evaluate).parameters)
    assert {"text_column", "splits", "dataset", "pipeline"} <= names
    left = [
        f"{where}: {said}"
        for where, message in _messages()
        for said in [in_options(message)]
        if names.intersection(re.findall(r"\b([a-z_]+)=", said))
    ]
    assert left == [], "\n".join(left)


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ("name the one to read with text_column=", "name the one to read with --text-column"),
        ("pass max_seq_length=128 to truncate them", "pass --max-seq-length 128 to truncate them"),
        ("has the splits a, b: choose one, splits=", "has the splits a, b: choose one, --split"),
        ("give a larger max_seq_length", "give a larger --max-seq-length"),
    ],
)
def test_arguments_become_options(message: str, said: str) -> None:
    assert in_options(message) == said


@pytest.mark.parametrize("option", sorted({*ARGUMENTS.values()}))
def test_every_option_that_a_message_names_exists(option: str) -> None:
    commands = typer.main.get_command(build()).commands.values()  # type: ignore[attr-defined]
    assert option in {name for command in commands for p in command.params for name in p.opts}


@pytest.mark.parametrize("words", WORDS)
def test_translated_words_are_still_said_somewhere(words: str) -> None:
    texts = (path.read_text("utf-8") for path in SOURCE.rglob("*.py") if "cli" not in path.parts)
    assert any(words in text for text in texts)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (FileNotFoundError(errno.ENOENT, "x", "a/b"), 1, "a/b: there is no such file or folder"),
        (PermissionError(errno.EACCES, "x", "a/b"), 1, "a/b: permission denied"),
        (OSError(errno.ENOSPC, "x", "a/b"), 1, "a/b: the disk is full; make room"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
        (MemoryError(), 1, "out of memory"),
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), 1, "install datasets"),
        (SteelyardError("layer is wrong; mend it"), 1, "layer is wrong; mend it"),
        (RuntimeError("some\n library"), 1, "some library (--traceback shows where)"),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
)
def test_one_line_for_each_kind_of_error(
    error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert explain(error) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ") and said in captured.err
    assert captured.err.count("\n") == 1


def test_a_defect_shows_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    def broken() -> None:
        raise AttributeError("no attribute 'x'")

    with pytest.raises(AttributeError) as caught:
        broken()
    assert explain(caught.value) == 1
    said = capsys.readouterr().err
    assert "in broken" in said
    assert "This is a defect of Steelyard" in said.splitlines()[-1]


@pytest.mark.parametrize(
    ("option", "environment", "shown"),
    [
        (False, None, False),
        (True, None, True),
        (False, "1", True),
        (False, "0", False),
        (False, "", False),
        (False, "false", False),
    ],
)
def test_traceback_where_it_is_asked_for(
    option: bool,
    environment: str | None,
    shown: bool,
    steelyard: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("STEELYARD_TRACEBACK", raising=False)
    if environment is not None:
        monkeypatch.setenv("STEELYARD_TRACEBACK", environment)
    extra: list[Any] = ["--traceback"] if option else []
    answer = steelyard("inspect", tmp_path, *extra)
    assert answer.code == 1
    assert ("Traceback" in answer.err) is shown
    assert "holds no *.safetensors" in answer.err.splitlines()[-1]
