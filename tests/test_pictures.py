"""The pictures of docs/observers.md are what the observers of this version draw."""

from __future__ import annotations

import importlib.util
import re
import sys
import xml.etree.ElementTree as ET
from pathlib import Path
from types import ModuleType

import pytest

from steelyard.names import observer_names

FOLDER = Path(__file__).parent.parent / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def make() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_pictures", FOLDER / "make.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


@pytest.fixture(scope="module")
def drawn(make: ModuleType) -> dict[str, str]:
    return dict(make.pictures())


def test_files_are_up_to_date(drawn: dict[str, str]) -> None:
    stored = {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")}
    assert sorted(stored) == sorted(drawn)
    stale = [name for name in drawn if drawn[name] != stored[name]]
    assert not stale, f"python docs/pictures/make.py draws {', '.join(stale)} anew"


def test_every_observer_with_a_section_has_a_picture(drawn: dict[str, str]) -> None:
    page = (FOLDER.parent / "observers.md").read_text(encoding="utf-8")
    assert set(drawn) == set(re.findall(r"^### `(\w+)`$", page, re.MULTILINE))
    assert set(drawn) <= set(observer_names())


def test_pictures_need_nothing_else_and_know_the_dark(drawn: dict[str, str]) -> None:
    for name, text in drawn.items():
        root = ET.fromstring(text)
        width, height = map(float, root.attrib["viewBox"].split()[2:])
        assert root.find(f"{SVG}title") is not None, name
        assert "prefers-color-scheme: dark" in text, name
        assert text.count("http") == 1, f"{name} points outside, beyond its namespace"
        for dot in root.iter(f"{SVG}circle"):
            assert 0 < float(dot.attrib["cx"]) < width, name
            assert 0 < float(dot.attrib["cy"]) < height, name


def test_what_the_pictures_claim(make: ModuleType) -> None:
    """The search beats min-max, the exact one beats it, and weights change the answer."""
    row, squares = make.weights(), make.importance()

    def scale(name: str, *more: object, **options: object) -> float:
        return make.qparams(name, row, make.INT4, *more, **options)[0]

    def error(found: float, weighed: object = None) -> float:
        return make.error(row, make.int4_codes(found), weighed)

    whole, searched = map(scale, ("memoryless_minmax", "memoryless_mse"))
    exact = scale("optimal", norm=2.0)
    assert error(whole) > error(searched) > error(exact)
    assert error(exact) == pytest.approx(
        min(error(s) for s in make.bf16_between(0.5 * whole, 1.1 * whole))
    )
    mirrored = scale("optimal", norm=2.0, negative_scales=True)
    assert mirrored < 0 and error(mirrored) < error(exact)
    weighed = scale("imatrix_mse", squares)
    assert error(weighed, squares) < error(searched, squares)
    group = make.fp4_group()
    plain, grown = (
        found / divisor
        for found, divisor in (
            make.qparams(name, group, make.NVFP4)
            for name in ("memoryless_minmax", "nvfp4_expanded_mse")
        )
    )
    assert 3.5 < max(group[:16]) / grown < 5, "the largest is stored as 4"
    assert make.error(group[:16], make.fp4_codes(grown)) < make.error(
        group[:16], make.fp4_codes(plain)
    )
