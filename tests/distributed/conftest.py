"""Helpers beside the tests, and the small models of the pipelines, by their own names."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "pipelines")]
