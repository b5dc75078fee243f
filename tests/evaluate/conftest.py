"""Helpers beside the tests, and beside those of the pipelines, are imported by their own names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pipelines")]
