"""Which rows of a weight are decoded."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from steelyard.checkpoint.against_source import _spans


@pytest.mark.parametrize(
    ("shape", "budget", "expected"),
    [
        ((64, 64), 1, [(0, 64)]),  # neighbours are read and decoded in one go
        ((96, 64), 1, [(0, 32), (64, 96)]),
        ((320, 64), 5 * 32 * 64, [(0, 32), (64, 96), (128, 160), (224, 256), (288, 320)]),
        ((40, 64), None, [(0, 40)]),
    ],
)
def test_spans(shape: tuple[int, int], budget: int | None, expected: list[Any]) -> None:
    stored: Any = SimpleNamespace(shape=shape, unit=32)
    assert _spans(stored, budget) == expected
