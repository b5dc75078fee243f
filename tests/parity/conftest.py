"""Every instruction set that this processor has, one at a time; helpers of the kernels' tests."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from steelyard.kernels.backend import extension


def instruction_sets() -> list[str]:
    native, _ = extension()
    return native.instruction_sets() if native is not None else []


# all kernels but the products of inputs are those of avx512
BUILDS = [name for name in instruction_sets() if name != "avx512_bf16"]


@pytest.fixture(params=BUILDS)
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STEELYARD_ISA", request.param)
    return str(request.param)


@pytest.fixture
def builds() -> list[str]:
    """All of them, for a test that compares each with one result of the reference."""
    return BUILDS or pytest.skip("there is no extension")


@pytest.fixture(params=instruction_sets())
def product_isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("STEELYARD_ISA", request.param)
    return str(request.param)


@pytest.fixture
def interpreter() -> Iterator[None]:
    """Triton's interpreter, which computes with NumPy: silent about infinities, as a GPU is."""
    with np.errstate(all="ignore"):
        yield
