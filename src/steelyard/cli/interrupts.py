"""Makes sure that Ctrl-C ends a command.

Python raises KeyboardInterrupt wherever the main thread happens to be. A finalizer, a callback of a
weak reference or a bare `except` swallows it, and the run continues. So the handler checks a moment
later whether the exception is propagating, and raises another one if not.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

__all__ = ["interruptible"]

_CHECK_AFTER = 0.2  # seconds until the handler checks that the exception is propagating


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT until it propagates out of this context.

    Changes nothing if SIGINT is ignored (as in a shell's background jobs), or if a program that
    embeds the command has its own handler.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler, report = _Handler(), sys.unraisablehook

    def quiet(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):  # it is raised again
            report(dropped)

    signal.signal(signal.SIGINT, handler)
    sys.unraisablehook = quiet
    try:
        yield
    finally:
        handler.close()
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, signal.default_int_handler)


class _Handler:
    """Raises KeyboardInterrupt, and again if something swallowed it."""

    def __init__(self) -> None:
        self._raised: KeyboardInterrupt | None = None
        self._checking = False  # the signal is our own, to check on the exception
        self._closed = False
        self._timer: threading.Timer | None = None
        self._thread = threading.main_thread().ident

    def __call__(self, *_: object) -> None:
        checking, self._checking = self._checking, False
        if checking and self._closed:
            return
        self._schedule()
        if checking and self._is_propagating():
            return
        self._raised = KeyboardInterrupt()
        raise self._raised

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # so that its signal comes before the handler is removed

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_CHECK_AFTER, self._check)
        self._timer.daemon = True
        self._timer.start()

    def _check(self) -> None:
        self._checking = True
        assert self._thread is not None
        signal.pthread_kill(self._thread, signal.SIGINT)  # also wakes the main thread

    def _is_propagating(self) -> bool:
        """Whether the main thread is in an `except`, `finally` or `with` that handles it."""
        error = sys.exc_info()[1]
        while error is not None and error is not self._raised:
            error = error.__context__
        return error is not None
