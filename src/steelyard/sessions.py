"""Sessions and events of llm-compressor, as far as scripts need them.

Nothing is kept between two calls of `oneshot` here, so a session is empty: it can be created, asked
for and reset. State and events exist for the annotations of modifiers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

__all__ = [
    "CompressionSession",
    "Event",
    "EventType",
    "LifecycleCallbacks",
    "State",
    "active_session",
    "callbacks",
    "create_session",
    "reset_session",
]


class EventType(Enum):
    """Moments of a calibration in llm-compressor."""

    INITIALIZE = "initialize"
    FINALIZE = "finalize"
    BATCH_START = "batch_start"
    BATCH_END = "batch_end"
    CALIBRATION_START = "calibration_start"
    SEQUENTIAL_EPOCH_END = "sequential_epoch_end"
    CALIBRATION_END = "calibration_end"


@dataclass
class Event:
    """One such moment."""

    type_: EventType | None = None


@dataclass
class State:
    """What a session holds in llm-compressor; here nothing."""

    model: Any = None


@dataclass
class CompressionSession:
    """A session without content."""

    state: State = field(default_factory=State)

    def reset(self) -> None:
        """Forget nothing: there is nothing."""
        self.state = State()


_active: list[CompressionSession] = [CompressionSession()]


def active_session() -> CompressionSession:
    """Return the session of the innermost `create_session`, or that of the process."""
    return _active[-1]


@contextlib.contextmanager
def create_session() -> Iterator[CompressionSession]:
    """Make a new session the active one."""
    session = CompressionSession()
    _active.append(session)
    try:
        yield session
    finally:
        _active.pop()


def reset_session() -> None:
    """Reset the active session."""
    active_session().reset()


class LifecycleCallbacks:
    """Refuses every event: there is no session to send it to."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"callbacks.{name}: a run here sends no events; write an algorithm, which is called "
            "with every batch (steelyard.algorithms.Algorithm)"
        )


callbacks = LifecycleCallbacks()
