"""Calls a function in a process of its own, in which the toy device is installed."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from forked import start_forked

LONGEST = 240  # seconds


def on_toy(
    folder: Path, function: Callable[..., Any], *args: Any, backend: str = "reference"
) -> Any:
    """Return `function(*args)`; the function is one of a module in this folder.

    backend: of the kernels, on the CPU too, so that both devices compute alike
    """
    answer = folder / "answer.pickle"
    process = start_forked(_call, answer, function, args, backend)
    process.join(LONGEST)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert answer.is_file(), f"the process ended with {process.exitcode} and no answer"
    found, error = pickle.loads(answer.read_bytes())
    answer.unlink()
    assert error is None, error
    return found


def _call(answer: Path, function: Callable[..., Any], args: tuple[Any, ...], backend: str) -> None:
    os.environ["STEELYARD_BACKEND"] = backend
    found, error = None, None
    try:
        import toy_device

        toy_device.install()
        found = function(*args)
    except BaseException:
        error = traceback.format_exc()
    answer.write_bytes(pickle.dumps((found, error)))
