"""The pages hang together: links, anchors and the navigation, from their Markdown alone.

`make docs` checks the built site once more; this needs nothing but the files. An anchor must hold
both on the site and where the repository shows its Markdown, which form them a little differently.
"""

from __future__ import annotations

import re
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
FENCE = re.compile(r"^(```+).*?^\1$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
HOSTS = {"github.com", "keepachangelog.com", "semver.org"}


def prose_of(page: Path) -> str:
    """Return a page without its blocks of code, nor code within lines."""
    return re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text(encoding="utf-8")))


def links_of(page: Path) -> list[tuple[bool, str]]:
    """Return for each link whether it is a picture, and where it leads."""
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    return [(mark == "!", target) for mark, _, target in LINK.findall(text)]


def headings_of(page: Path) -> list[str]:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    found = re.findall(r"^#{1,6} +(.+?)\s*$", text, re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", h).replace("`", "") for h in found]


def site_anchor(heading: str) -> str:
    """Return the anchor that Python-Markdown gives a heading."""
    kept = re.sub(r"[^\w\s-]", "", heading, flags=re.ASCII).strip().lower()
    return re.sub(r"[-\s]+", "-", kept)


def repository_anchor(heading: str) -> str:
    """Return the anchor that GitHub and its like give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_the_checks_see_something() -> None:
    assert site_anchor("Large models, and runs") == repository_anchor("Large models, and runs")
    assert site_anchor("a + b") == "a-b" and repository_anchor("a + b") == "a--b"
    assert sum(len(links_of(page)) for page in PAGES) > 50
    assert "memoryless_minmax" in headings_of(DOCS / "observers.md")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for _, link in links_of(page):
        if urlsplit(link).scheme:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{page.name} links to {link}"
        if anchor:
            headings = headings_of(target)
            for form in (site_anchor, repository_anchor):
                known = [form(heading) for heading in headings]
                assert known.count(anchor) == 1, f"{page.name} links to {link}: {form.__name__}"


def test_pictures_say_what_they_show() -> None:
    for page in PAGES:
        text = FENCE.sub("", page.read_text(encoding="utf-8"))
        for mark, words, target in LINK.findall(text):
            assert not mark or len(words) > 20, f"{page.name}: {target} has no description"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_elsewhere_are_few(page: Path) -> None:
    outside = [urlsplit(link) for _, link in links_of(page) if urlsplit(link).scheme]
    assert len(outside) <= 5
    for url in outside:
        assert url.scheme == "https" and url.hostname in HOSTS, url.geturl()
    assert not re.search(r"https?://", LINK.sub("", prose_of(page))), "a bare address"


def test_nothing_leads_out_of_the_repository() -> None:
    for page in PAGES:
        for _, link in links_of(page):
            if not urlsplit(link).scheme:
                target = (page.parent / link.partition("#")[0]).resolve()
                assert target.is_relative_to(ROOT.resolve()), f"{page.name} links to {link}"


def test_pages_of_the_site_link_to_its_pages() -> None:
    """Which is all that there is on it: the folder, and the measurements."""
    known = {*DOCS.resolve().rglob("*"), (ROOT / "benchmarks" / "README.md").resolve()}
    for page in DOCS.glob("*.md"):
        for _, link in links_of(page):
            path = link.partition("#")[0]
            if path and not urlsplit(link).scheme:
                assert (page.parent / path).resolve() in known, f"{page.name} links to {link}"


def nav_files(entries: object) -> list[str]:
    if isinstance(entries, str):
        return [entries]
    values = entries.values() if isinstance(entries, dict) else entries
    return [file for value in values for file in nav_files(value)]


def test_the_navigation_has_every_page_once() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    listed = nav_files(config["nav"])
    assert sorted(listed) == sorted(
        [*(p.name for p in DOCS.glob("*.md")), "api.md", "benchmarks.md"]
    )


def test_the_site_is_strict_and_needs_no_network() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert config["strict"] is True
    assert config["theme"]["font"] is False
    assert set(config["validation"].values()) == {"warn"}, "which strict turns into errors"
    assert not {"extra_javascript", "repo_url"} & set(config)
    assert config["extra_css"] == ["site.css"] and "url(" not in (DOCS / "site.css").read_text()
    assert "http" not in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")


def test_every_page_starts_with_its_title() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# "), page.name
        assert len(re.findall(r"^# ", FENCE.sub("", text), re.MULTILINE)) == 1, page.name
