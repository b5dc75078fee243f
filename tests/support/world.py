"""Starting real processes that make up a world, and waiting for all of them."""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from forked import start_forked

TIMEOUT = 240  # seconds until a world that hangs is given up
AFTER = 60  # seconds, once one of them has failed


def start(
    script: str,
    arguments: Sequence[str],
    world: int,
    folder: Path,
    stopped: Sequence[int] = (),
) -> tuple[list[int | None], list[str]]:
    """Run `script rank world folder *arguments` for each rank; return exit codes and outputs.

    stopped: ranks that will never end, and that nobody waits for
    """
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes: list[BaseProcess] = []
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank, log in enumerate(logs):
            words = [script, str(rank), str(world), str(folder), *arguments]
            processes.append(start_forked(_run, words, log))
        while None in (codes := _codes(processes, stopped)):
            if any(codes):  # what does not end soon after another has failed never will
                deadline = min(deadline, time.monotonic() + AFTER)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = _codes(processes)
        for process in processes:
            process.kill()
            process.join()
    return codes, [log.read_text() for log in logs]


def _run(words: list[str], log: Path) -> None:
    """Run a script as a rank of its own, with all that it says in a file."""
    with log.open("wb") as output:
        for stream in (sys.stdout, sys.stderr):
            os.dup2(output.fileno(), stream.fileno())
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    sys.argv = words
    runpy.run_path(words[0], run_name="__main__")


def _codes(processes: Sequence[BaseProcess], without: Sequence[int] = ()) -> list[int | None]:
    return [process.exitcode for rank, process in enumerate(processes) if rank not in without]
