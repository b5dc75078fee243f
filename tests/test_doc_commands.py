"""Every `steelyard ...` line in README.md and docs/ is a command that there is.

Each is parsed by the program itself: unknown commands and options, missing arguments and values out
of range are refused. Those that need a model and no data are run on the one that ships along.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from pages import own_registrations, write_files

from steelyard.cli.app import build, run

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL_BLOCK = re.compile(r"^```sh\n(.*?)^```$", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(steelyard [^`]+)`")
CHEAP = {"inspect", "validate", "compare", "ls"}


def commands_of(page: Path) -> list[str]:
    """Return the lines of shell blocks, and what stands in the text with real arguments."""
    text = page.read_text(encoding="utf-8")
    lines = [line for block in SHELL_BLOCK.findall(text) for line in block.splitlines()]
    lines = [line.partition("  #")[0].strip() for line in lines]
    inline = [c for c in INLINE.findall(text) if not re.search(r"\b[A-Z]{4,}|\.\.\.", c)]
    complete = [c for c in inline if c.split()[1:2] in (["demo"], ["ls"])]
    return [line for line in [*lines, *complete] if line.startswith("steelyard ")]


COMMANDS = [(page.name, line) for page in PAGES for line in commands_of(page)]


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder in which every folder of the pages is the model that ships along."""
    from steelyard.demo import model_folder

    monkeypatch.chdir(tmp_path)
    (tmp_path / "path" / "to").mkdir(parents=True)
    for name in ("path/to/model", "qwen"):
        (tmp_path / name).symlink_to(model_folder())
    for page in PAGES:
        write_files(page, tmp_path)
    with own_registrations():
        yield tmp_path


def parsed(line: str) -> tuple[str, dict[str, Any]]:
    """Return the name of a command and its arguments, as the program reads them."""
    program = typer.main.get_command(build(rich=False))
    name, *arguments = shlex.split(line)[1:]
    command = program.commands[name]  # type: ignore[attr-defined]
    return name, command.make_context(name, arguments).params


def test_the_pages_have_commands() -> None:
    assert len(COMMANDS) > 20
    assert {"README.md", "index.md", "command-line.md", "report.md"} <= {p for p, _ in COMMANDS}
    assert {line.split()[1] for _, line in COMMANDS} >= CHEAP | {"quantize", "evaluate", "demo"}


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_command_is_understood(page: str, line: str, workplace: Path) -> None:
    _, params = parsed(line)
    assert params.get("model", "x")


@pytest.mark.parametrize(
    "line", ["steelyard quantize path/to/model --schem W4A16", "steelyard inspect ./nowhere"]
)
def test_the_check_can_fail(line: str, workplace: Path) -> None:
    with pytest.raises(typer.BadParameter.__mro__[1]):
        parsed(line)


def test_what_needs_no_data_runs(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the order of the pages, each line once; what was quantized before is there."""
    import warnings

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    ran = set()
    for _, line in COMMANDS:
        name, params = parsed(line)
        data = any(params.get(each) for each in ("data", "statistics", "evaluate"))
        free = name == "quantize" and not data
        if line in ran or data or not (free or name in CHEAP):
            continue
        more = ["--overwrite"] if free else []
        assert run([*shlex.split(line)[1:], *more]) == 0, (line, capsys.readouterr().err)
        assert capsys.readouterr().out.strip(), line
        ran.add(line)
    assert len(ran) >= 8
