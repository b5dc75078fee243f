"""The code in README.md and docs/ runs, each page from top to bottom in one namespace."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PYTHON_BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_runs(page, monkeypatch):
    text = page.read_text(encoding="utf-8")
    blocks = PYTHON_BLOCK.findall(text)
    assert blocks, f"{page.name} has no python block"
    namespace = {"__name__": page.stem}
    for block in blocks:
        line = text[: text.index(block)].count("\n")
        exec(compile("\n" * line + block, str(page), "exec"), namespace)


def test_readme_table_lists_every_observer():
    from steelyard.observers import Observer

    named = set(re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE))
    ours = {
        name
        for name in Observer.registered_names()
        if Observer.get_value_from_registry(name).__module__.startswith("steelyard.")
    }
    assert named == ours


def test_readme_states_the_defaults():
    from steelyard.observers import Observer

    rows = (ROOT / "README.md").read_text().split("\n")
    for name in ("minmax", "memoryless_mse", "imatrix_mse"):
        row = next(r for r in rows if r.startswith(f"| `{name}`"))
        stated = dict(re.findall(r"`(\w+)` \(([\w.]+)\)", row))
        declared = Observer.get_value_from_registry(name).Options().model_dump()
        assert {k: str(v) for k, v in declared.items()} == {
            k: str(type(declared[k])(float(v)) if v != "False" else v) for k, v in stated.items()
        }


def test_relative_links_resolve():
    for page in PAGES:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
