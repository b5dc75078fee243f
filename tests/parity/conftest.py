"""Every instruction set that this processor has, one at a time; helpers of the kernels' tests."""

from __future__ import annotations

import pytest

from steelyard.kernels.backend import extension


def instruction_sets() -> list[str]:
    native, _ = extension()
    return native.instruction_sets() if native is not None else []


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STEELYARD_ISA", request.param)
    return str(request.param)
