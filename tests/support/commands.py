"""What a command answered, and the environment that it is given in."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FORWARD = "STEELYARD_FORWARD"  # which conftest.py sets for all processes


class Answer(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def document(self) -> Any:
        return json.loads(self.out)


Command = Callable[..., Answer]


def environment_with(**more: str) -> dict[str, str]:
    ours = ("STEELYARD", "_STEELYARD")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) or k == FORWARD}
    path = os.pathsep.join(p for p in (str(ROOT / "src"), kept.get("PYTHONPATH")) if p)
    return {**kept, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **more}


def expected_warning(message: str, category: type[Warning]) -> dict[str, str]:
    """The environment of a process in which one warning is shown, and all others are errors."""
    filters = f"{os.environ['PYTHONWARNINGS']},default:{message}:{category.__name__}"
    return {"PYTHONWARNINGS": filters}
