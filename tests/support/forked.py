"""Processes that start quickly: a server imports the libraries once, and forks for each."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from typing import Any
from unittest.mock import patch

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "steelyard.engine.oneshot", "transformers.models.llama.modeling_llama"]
)


def start_forked(target: Callable[..., Any], *args: Any) -> BaseProcess:
    with patch.dict(os.environ, OMP_NUM_THREADS="1"):  # a fork has none of its parent's threads
        forkserver.ensure_running()
    process = _CONTEXT.Process(target=_with_environment, args=(dict(os.environ), target, args))
    process.start()
    return process


def _with_environment(
    environment: dict[str, str], target: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Run in the environment of the test: the server has that of the first test it served."""
    os.environ.clear()
    os.environ.update(environment)
    target(*args)
