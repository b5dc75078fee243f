"""The demo's last line is a command that can be pasted."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from steelyard.cli.demo import program


@pytest.mark.parametrize("on_path", [True, False])
def test_the_program_is_called_as_the_shell_finds_it(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = tmp_path / "my env" / "steelyard"
    own.parent.mkdir()
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    monkeypatch.setattr(sys, "argv", [str(own)])
    monkeypatch.setenv("PATH", str(own.parent if on_path else tmp_path))
    assert program() == ("steelyard" if on_path else f"'{own}'")
