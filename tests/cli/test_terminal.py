"""What is printed to a terminal, to a pipe, and where colours are not wanted."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from pathlib import Path

import pytest
from commands import Command, environment_with

from steelyard.cli.terminal import Column, duration, number, print_document, print_table, size

CODES = re.compile(r"\x1b\[[0-9;?]*[a-zA-Z]")


def on_terminal(*arguments: object, columns: int = 80, **environment: str) -> tuple[int, str]:
    """Give a command on a terminal of so many columns; return its exit code and what it printed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    with subprocess.Popen(
        [sys.executable, "-m", "steelyard", *map(str, arguments)],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        # what a test before this one may have left in the environment must not count
        env=environment_with(TERM="xterm-256color", COLUMNS=str(columns), **environment),
    ) as process:
        os.close(theirs)
        said = b""
        while True:
            try:
                piece = os.read(ours, 1 << 16)
            except OSError:  # how Linux says that nobody holds the other end any more
                break
            if not piece:
                break
            said += piece
    os.close(ours)
    return process.returncode, said.decode().replace("\r\n", "\n")


def test_table_fits_the_terminal_and_has_colours(model: Path) -> None:
    code, said = on_terminal("inspect", model)
    assert code == 0
    assert "\x1b[36m" in said
    lines = CODES.sub("", said).split("\n")
    table = lines[: lines.index("")]
    assert max(len(line) for line in table) <= 80
    assert table[1].split() == ["lm_head", "1", "bf16", "128x128", "32.8", "kB"]
    code, narrow = on_terminal("inspect", model, columns=50, NO_COLOR="1")
    assert "\x1b[36m" not in narrow and "\x1b[3" not in narrow
    lines = CODES.sub("", narrow).split("\n")
    assert max(len(line) for line in lines[: lines.index("")]) <= 50
    assert "…" not in narrow


def test_help_on_a_terminal_keeps_examples_whole() -> None:
    code, said = on_terminal("inspect", "--help", columns=100)
    assert code == 0
    assert "steelyard inspect path/to/model --all" in CODES.sub("", said)


def test_mistake_on_a_terminal_is_one_line() -> None:
    assert on_terminal("inspect", "./nothing") == (
        2,
        "error: there is no folder './nothing'; give a folder, or a name on the hub "
        "(steelyard inspect --help)\n",
    )


def test_pipe_gets_whole_names_without_colours(process: Command, model: Path) -> None:
    answer = process("inspect", model, COLUMNS="20")
    assert "\x1b" not in answer.out
    assert "model.layers.{0-2}.post_attention_layernorm" in answer.out
    assert answer.err == ""


def test_reader_that_leaves_is_no_error(model: Path) -> None:
    command = f"{sys.executable} -m steelyard inspect {model} --all --json | head -c 10"
    done = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, env=environment_with(), check=True
    )
    assert done.stdout.startswith("{")
    assert done.stderr == ""


def test_version_and_module(process: Command) -> None:
    answer = process("--version")
    assert (answer.code, answer.err) == (0, "")
    assert re.fullmatch(r"steelyard(, not installed as a package| \d+\.\d+.*)\n", answer.out)


def test_plain_table(capsys: pytest.CaptureFixture[str]) -> None:
    print_table([Column("name"), Column("n", True)], [["a" * 100, "1"], ["b", "23"]])
    assert capsys.readouterr().out.splitlines() == [
        "name" + " " * 96 + "   n",
        "a" * 100 + "   1",
        "b" + " " * 99 + "  23",
    ]


def test_document_holds_only_what_json_knows(capsys: pytest.CaptureFixture[str]) -> None:
    print_document("x", {"a": float("nan"), "b": (1, float("inf")), "c": {3: 0.5}})
    import json

    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found == {"schema": 1, "command": "x", "a": None, "b": [1, None], "c": {"3": 0.5}}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (size(999), "999 bytes"),
        (size(123_400_000), "123.4 MB"),
        (size(5e13), "50.0 TB"),
        (number(None), "-"),
        (number(0.000123456), "0.000123"),
        (number(12.3456, 4), "12.35"),
        (number(-4712.3), "-4712"),
        (number(1.5e7), "1.5e+07"),
        (duration(1.26), "1.3 s"),
        (duration(300), "5 min"),
        (duration(36000), "10.0 h"),
    ],
)
def test_numbers(said: str, expected: str) -> None:
    assert said == expected
