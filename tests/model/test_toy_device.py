"""The toy device has the rules of a GPU; other tests rely on it to fail where a GPU would."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import toy_checks
from toy_process import on_toy

CHECKS = [
    toy_checks.is_an_accelerator,
    toy_checks.parameters_move,
    toy_checks.devices_do_not_mix,
    toy_checks.memory_is_counted,
    toy_checks.transfers_are_logged,
    toy_checks.streams_need_a_wait,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_toy_device(tmp_path: Path, check: Callable[[], None]) -> None:
    on_toy(tmp_path, check)
