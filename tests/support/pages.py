"""Files that a page of the docs shows, by the titles of their blocks."""

from __future__ import annotations

import re
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
