"""Rows and sections of docs/observers.md for observers that the page does not describe yet.

A new observer needs no page: the site (`docs/hooks.py`) lists it with its docstring and options. A
section written by hand, with a formula and a picture, replaces the generated one.

    python tools/observer_docs.py     prints the page with everything that is generated
"""

from __future__ import annotations

import re
from pathlib import Path

from steelyard.names import observer_modules
from steelyard.observers import Observer

__all__ = ["complete"]

PAGE = Path(__file__).resolve().parents[1] / "docs" / "observers.md"
_TABLE = re.compile(
    r"^\| observer \| range \| for \|\n\|---\|---\|---\|\n((?:\|.*\n)*)", re.MULTILINE
)
_SECTIONS = "## One by one\n"


def complete(markdown: str) -> str:
    """Return the page with a row and a section for every observer of the package."""
    missing = [name for name in _ours() if f"### `{name}`\n" not in markdown]
    table = _TABLE.search(markdown)
    if table is None or _SECTIONS not in markdown:
        raise ValueError("docs/observers.md has no table of observers, or no section One by one")
    rows = "".join(_row(name) for name in _ours() if f"| [`{name}`]" not in table[1])
    markdown = markdown[: table.end()] + rows + markdown[table.end() :]
    start = markdown.index(_SECTIONS) + len(_SECTIONS)
    after = re.search(r"^## ", markdown[start:], re.MULTILINE)
    end = len(markdown) if after is None else start + after.start()
    return markdown[:end] + "".join(_section(name) for name in missing) + markdown[end:]


def _ours() -> list[str]:
    return sorted(name for group in observer_modules().values() for name in group)


def _row(name: str) -> str:
    observer = Observer.get_value_from_registry(name)
    summary = Observer.registry.describe()[name].rstrip(".")
    return f"| [`{name}`](#{name}) | {summary} | {observer.suits} |\n"


def _section(name: str) -> str:
    observer = Observer.get_value_from_registry(name)
    text = f"### `{name}`\n\n{(observer.__doc__ or '').strip()}\n\nFor {observer.suits}.\n\n"
    fields = {} if observer.Options is None else observer.Options.model_fields
    if not fields:
        return text + "It has no options.\n\n"
    defaults = {} if observer.Options is None else observer.Options().model_dump()
    rows = [f"| `{n}` | {defaults[n]} | {field.description or ''} |" for n, field in fields.items()]
    return text + "\n".join(["| option | default | |", "|---|---|---|", *rows]) + "\n\n"


if __name__ == "__main__":
    print(complete(PAGE.read_text(encoding="utf-8")), end="")
