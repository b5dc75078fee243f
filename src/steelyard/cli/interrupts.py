"""Ctrl-C on the command line: it always arrives.

Python raises KeyboardInterrupt wherever the main thread happens to be. In a finalizer, a callback
of a weak reference or under a bare `except` the exception is dropped, and the run goes on as if
nobody had pressed a key. So the handler looks again a moment later: unless the exception is on its
way up, it raises another.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Iterator

__all__ = ["interruptible"]

_AGAIN = 0.2  # seconds until the handler looks whether the exception is on its way


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt for SIGINT until it is on its way out of this context.

    Where SIGINT is ignored (as in a shell's background jobs), or a program that embeds the command
    has a handler of its own, nothing is changed.
    """
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    handler, report = _Handler(), sys.unraisablehook

    def quiet(dropped: sys.UnraisableHookArgs) -> None:
        if not isinstance(dropped.exc_value, KeyboardInterrupt):  # which will come again
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
    """Raises KeyboardInterrupt, and again if it was dropped."""

    def __init__(self) -> None:
        self._given: KeyboardInterrupt | None = None
        self._looks = False  # the signal is our own, to look whether the exception is on its way
        self._closed = False
        self._timer: threading.Timer | None = None
        self._thread = threading.main_thread().ident

    def __call__(self, *_: object) -> None:
        looks, self._looks = self._looks, False
        if looks and self._closed:
            return
        self._wait()
        if looks and self._on_its_way():
            return
        self._given = KeyboardInterrupt()
        raise self._given

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()  # so that its signal comes before the handler goes

    def _wait(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = threading.Timer(_AGAIN, self._look)
        self._timer.daemon = True
        self._timer.start()

    def _look(self) -> None:
        self._looks = True
        assert self._thread is not None
        signal.pthread_kill(self._thread, signal.SIGINT)  # ends a wait of the main thread, too

    def _on_its_way(self) -> bool:
        """Whether the main thread is in an `except`, `finally` or `with` that handles it."""
        error = sys.exc_info()[1]
        while error is not None and error is not self._given:
            error = error.__context__
        return error is not None
