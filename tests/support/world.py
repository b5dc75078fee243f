"""Starting real processes that make up a world, and waiting for all of them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

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
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    paths = [p for p in sys.path if p]  # pytest may have added where steelyard is
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    logs = [folder / f"rank{rank}.log" for rank in range(world)]
    processes: list[subprocess.Popen[bytes]] = []
    deadline = time.monotonic() + TIMEOUT
    try:
        for rank, log in enumerate(logs):
            command = [sys.executable, "-W", "ignore", script, str(rank), str(world), str(folder)]
            with log.open("wb") as output:
                processes.append(
                    subprocess.Popen(
                        [*command, *arguments],
                        stdout=output,
                        stderr=subprocess.STDOUT,
                        env=environment,
                    )
                )
        while None in (codes := _codes(processes, stopped)):
            if any(codes):  # what does not end soon after another has failed never will
                deadline = min(deadline, time.monotonic() + AFTER)
            if time.monotonic() > deadline:
                break
            time.sleep(0.05)
    finally:
        codes = [process.poll() for process in processes]
        for process in processes:
            process.kill()
            process.wait()
    return codes, [log.read_text() for log in logs]


def _codes(
    processes: Sequence[subprocess.Popen[bytes]], without: Sequence[int]
) -> list[int | None]:
    return [process.poll() for rank, process in enumerate(processes) if rank not in without]
