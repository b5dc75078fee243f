"""Commands under torchrun: every rank runs the same command, and only the first one prints."""

from __future__ import annotations

import os
import signal

__all__ = ["is_first", "join", "rank"]

_TERMINATED = (
    "torchrun ended the run (SIGTERM) while all ranks were alive, for example at a time limit; "
    "the same command resumes it"
)


def rank() -> int:
    """Return this process's rank under torchrun, or 0."""
    text = os.environ.get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def is_first() -> bool:
    return rank() == 0


def join() -> None:
    """Join the ranks that torchrun has started, if any."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        from steelyard.distributed import join_from_environment

        join_from_environment()
        signal.signal(signal.SIGTERM, _ended)


def _ended(*_: object) -> None:
    """End the run on SIGTERM with the reason, usually that another rank died."""
    from steelyard.distributed import Ranks

    ranks = Ranks.active()
    if ranks is None:  # no run is active
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)
    elif not ranks.ends:
        ranks.end(ranks.diagnose() or _TERMINATED)
