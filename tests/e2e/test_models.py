"""Every family that people serve, in four schemes, as docs/models.md states it."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_matrix import MATRIX
from model_table import PAGE, page_reasons, page_rows, try_family


@pytest.mark.parametrize("family", MATRIX)
def test_family_does_what_the_page_says(family: str, tmp_path: Path) -> None:
    page = PAGE.read_text("utf-8")
    assert try_family(family, tmp_path).line(page_reasons(page)) == page_rows(page)[family]
