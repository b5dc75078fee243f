"""Files that a page of the docs shows, by the titles of their blocks."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
_TITLED = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)


def write_files(page: Path, folder: Path) -> list[Path]:
    """Write the files of a page into a folder; return their paths."""
    found = []
    for name, content in _TITLED.findall(page.read_text(encoding="utf-8")):
        (folder / name).write_text(content)
        found.append(folder / name)
    return found


@contextlib.contextmanager
def own_registrations() -> Iterator[None]:
    """What is registered or imported inside is gone after it."""
    from steelyard.algorithms import Algorithm
    from steelyard.modifiers import Modifier
    from steelyard.observers import Observer

    known = [
        (registry, dict(registry._entries))
        for registry in (Algorithm.registry, Modifier.registry, Observer.registry)
    ]
    modules = set(sys.modules)
    try:
        yield
    finally:
        for registry, entries in known:
            registry._entries = entries
        for name in set(sys.modules) - modules:
            if name == "balance" or name.startswith("steelyard_plugin_"):
                del sys.modules[name]
