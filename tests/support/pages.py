"""Files that a page of the docs shows, by the titles of their blocks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
_TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the files of a page into a folder; return their paths."""
    found = []
    for name, content in _TITLED.findall(page.read_text(encoding="utf-8")):
        (folder / name).write_text(content)
        found.append(folder / name)
    return found


def keep_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget after a test what its page, or a plug-in of it, registered."""
    from steelyard.algorithms import Algorithm
    from steelyard.modifiers import Modifier
    from steelyard.observers import Observer

    for registry in (Algorithm.registry, Modifier.registry, Observer.registry):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
