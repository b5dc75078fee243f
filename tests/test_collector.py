"""The garbage collector pauses during imports, and is then as it was."""

from __future__ import annotations

import gc

import pytest

from steelyard.collector import paused


@pytest.mark.parametrize("enabled", [True, False])
def test_collector_is_as_it_was(enabled: bool) -> None:
    if not enabled:
        gc.disable()
    try:
        with pytest.raises(ZeroDivisionError), paused():
            assert not gc.isenabled()
            raise ZeroDivisionError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
