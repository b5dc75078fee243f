"""The garbage collector pauses during imports, and is then as it was."""

from __future__ import annotations

import gc

import pytest

from steelyard.collector import passing_over, paused


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


def test_a_run_collects_what_it_makes() -> None:
    with pytest.raises(ZeroDivisionError), passing_over():
        assert gc.get_freeze_count() > 0
        cycle: list[object] = []
        cycle.append(cycle)
        del cycle
        assert gc.collect() > 0
        raise ZeroDivisionError
    assert gc.get_freeze_count() == 0


def test_objects_that_were_frozen_before_stay_so() -> None:
    gc.freeze()
    try:
        with passing_over():
            pass
        assert gc.get_freeze_count() > 0
    finally:
        gc.unfreeze()
