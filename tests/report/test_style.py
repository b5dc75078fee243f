"""Style sheets of the page style what the page has, and use what they declare."""

from __future__ import annotations

import re
from importlib import resources

import pytest

FILES = {
    file.name: file.read_text("utf-8")
    for file in (resources.files("steelyard.report") / "template").iterdir()
    if file.name.endswith((".css", ".js", ".html"))
}
STYLE = "\n".join(text for name, text in FILES.items() if name.endswith(".css"))
PAGE = "\n".join(text for name, text in FILES.items() if not name.endswith(".css"))
SELECTORS = re.findall(r"([^{};]+)\{", re.sub(r"/\*.*?\*/", "", STYLE, flags=re.DOTALL))


def selected(pattern: str) -> set[str]:
    """Return the names that the selectors hold behind a dot or a hash."""
    found = {n for selector in SELECTORS for n in re.findall(pattern, selector)}
    assert found
    return found


@pytest.mark.parametrize("pattern", [r"\.(-?[a-z_][\w-]*)", r"#([a-z_][\w-]*)"])
def test_the_page_has_what_is_styled(pattern: str) -> None:
    # numbered and keyed classes are put together in the scripts: `c${level}`, `k-${column.key}`
    stems = {re.sub(r"^(c|l)\d+$|^(k-).*$", r"\1\2$", name) for name in selected(pattern)}
    missing = {n for n in stems if not re.search(rf"(?<![\w-]){re.escape(n)}(?![\w-])", PAGE)}
    assert missing == set()


def test_custom_properties_are_set_and_used() -> None:
    declared = set(re.findall(r"(--[a-z][\w-]*):", STYLE))
    used = set(re.findall(r"var\((--[a-z][\w-]*)", STYLE + PAGE))
    assert declared == used != set()


def test_no_rule_sets_a_property_twice() -> None:
    rules = re.findall(r"([^{};]+)\{([^{}]*)\}", STYLE)
    assert rules
    for selector, body in rules:
        names = re.findall(r"(?:^|;)\s*([\w-]+)\s*:", body)
        assert sorted(names) == sorted(set(names)), selector
