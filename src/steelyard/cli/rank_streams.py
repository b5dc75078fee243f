"""Under torchrun every process runs the same command; the first one speaks."""

from __future__ import annotations

import os
import signal

__all__ = ["is_first", "join", "rank"]

_TOLD_TO_END = (
    "torchrun ended the run (SIGTERM) while all ranks were alive, for example at a time limit; "
    "the same command resumes it"
)


def rank() -> int:
    """Return the number that torchrun gave this process, or 0."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_first() -> bool:
    return rank() == 0


def join() -> None:
    """Work together with the other processes that torchrun has started."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from steelyard.distributed import join_from_environment

        join_from_environment()
        signal.signal(signal.SIGTERM, _ended)


def _ended(*_: object) -> None:
    """Say why torchrun ends this process: mostly because another one has ended."""
    from steelyard.distributed import Ranks

    ranks = Ranks.active()
    if ranks is None:  # no run is under way
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif not ranks.ends:
        ranks.end(ranks.diagnose() or _TOLD_TO_END)
