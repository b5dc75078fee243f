"""Silences messages of libraries that a user cannot act on.

Called when a command starts, never at import, so that a program which imports this package keeps
its own settings.
"""

from __future__ import annotations

import os
import warnings

from steelyard.cli.rank_streams import is_first
from steelyard.engine.announce import announce

__all__ = ["quiet"]


def quiet() -> None:
    """Silence the logs of libraries; show our own warnings as one line each."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    warnings.showwarning = _show


def _show(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: object = None,
    line: str | None = None,
) -> None:
    ours = issubclass(category, UserWarning) and "steelyard" in filename
    if ours and is_first():
        announce(f"warning: {message}")
