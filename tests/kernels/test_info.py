"""What `info()` says, against what the machine says."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from steelyard import kernels
from steelyard.kernels import backend
from steelyard.kernels.range import range_of

CPUINFO = Path("/proc/cpuinfo")
X86_FEATURES = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl", "avx512_bf16"}


def test_info_describes_the_extension() -> None:
    from steelyard.kernels import _native

    info = kernels.info()
    assert info["backend"] == "compiled"
    assert info["instruction_set"] == _native.instruction_sets()[0]
    assert info["instruction_sets"] == _native.instruction_sets()
    assert info["extension"] is True
    assert info["extension_error"] is None
    assert info["compiler"] == _native.compiler()
    assert info["cpu_features"] == _native.cpu_features()


def test_compiler_has_a_name_and_a_version() -> None:
    name, version = str(kernels.info()["compiler"]).split(maxsplit=1)
    assert name in {"gcc", "clang", "msvc"}
    assert version[0].isdigit()


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not CPUINFO.exists(), reason="needs /proc/cpuinfo on x86-64"
)
def test_cpu_features_match_proc_cpuinfo() -> None:
    flags = next(
        line.partition(":")[2].split()
        for line in CPUINFO.read_text("utf-8").splitlines()
        if line.startswith("flags")
    )
    assert set(_features()) == X86_FEATURES.intersection(flags)


@pytest.mark.skipif(platform.machine() not in {"aarch64", "arm64"}, reason="needs a 64-bit Arm")
def test_cpu_features_on_arm() -> None:
    assert _features() == ["neon"]


@pytest.fixture
def missing_extension(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for cached in (backend.extension, backend._notice_missing):
        cached.cache_clear()
    monkeypatch.setitem(sys.modules, "steelyard.kernels._native", None)
    yield
    for cached in (backend.extension, backend._notice_missing):
        cached.cache_clear()


@pytest.mark.usefixtures("missing_extension")
def test_missing_extension_falls_back_with_one_notice() -> None:
    x = torch.randn(1, 4, 8)
    with pytest.warns(RuntimeWarning, match="plain-torch reference") as caught:
        first, second = range_of(x), range_of(x)
    assert len(caught) == 1, "one notice is enough"
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(first[0], x.amin((0, -1)))
    with pytest.raises(ValueError, match="cannot be imported"):
        range_of(x, backend="compiled")
    range_of(x, backend="reference")


def test_backend_is_forced_by_argument_and_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1, 4, 8)
    assert backend.use_compiled(x)
    assert not backend.use_compiled(x, "reference")
    monkeypatch.setenv("STEELYARD_BACKEND", "reference")
    assert not backend.use_compiled(x)
    assert kernels.info()["backend"] == "reference"
    assert backend.use_compiled(x, "compiled"), "the argument wins"
    monkeypatch.setenv("STEELYARD_BACKEND", "turbo")
    with pytest.raises(ValueError, match=r"STEELYARD_BACKEND must be one of .*'turbo'"):
        backend.use_compiled(x)
    with pytest.raises(ValueError, match=r"float64.*not fp32"):
        backend.use_compiled(x.double(), "compiled")
    assert not backend.use_compiled(x.double(), "auto")


def test_triton_runs_only_where_it_is_forced_or_drives_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("triton")
    x = torch.randn(1, 4, 8)
    backend.triton_device.cache_clear()
    assert backend.triton_device() == ("cpu", None), "interpreted"
    assert backend.use_triton(x, "triton")
    assert not backend.use_triton(x), "the interpreter is slow"
    assert not backend.use_compiled(x, "triton")
    with pytest.raises(ValueError, match=r"float64.*not fp32"):
        backend.use_triton(x.double(), "triton")
    with pytest.raises(ValueError, match=r"the tensor is on meta, and Triton runs on cpu"):
        backend.use_triton(x.to("meta"), "triton")
    assert not backend.use_triton(x.to("meta"))
    monkeypatch.setenv("STEELYARD_BACKEND", "triton")
    assert backend.use_triton(x)
    assert kernels.info()["backend"] == "triton"


def test_missing_triton_is_an_error_only_where_it_is_forced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend.triton_device.cache_clear()
    monkeypatch.setitem(sys.modules, "triton", None)
    try:
        x = torch.empty(1, 4, 8, device="meta")
        assert not backend.use_triton(x)
        with pytest.raises(ValueError, match=r"cannot be imported.*steelyard\[gpu\]"):
            backend.use_triton(x, "triton")
    finally:
        backend.triton_device.cache_clear()


@pytest.mark.parametrize("interpreted", ["0", "1"])
def test_triton_is_imported_only_when_used(interpreted: str) -> None:
    """Nor does a machine without a GPU need it: `auto` on CPU tensors never asks."""
    code = (
        "import sys, torch; from steelyard.kernels.range import range_of; "
        "range_of(torch.ones(1, 2, 3)); print('steelyard.kernels.triton_range' in sys.modules)"
    )
    environment = {**os.environ, "TRITON_INTERPRET": interpreted}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def test_instruction_set_is_forced_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STEELYARD_ISA", "baseline")
    assert kernels.info()["instruction_set"] == "baseline"
    monkeypatch.setenv("STEELYARD_ISA", "mmx")
    with pytest.raises(ValueError, match=r"STEELYARD_ISA must be one of .*baseline.*'mmx'"):
        kernels.info()


@pytest.mark.usefixtures("missing_extension")
def test_missing_extension_is_reported_with_the_reason() -> None:
    info = kernels.info()
    assert info["backend"] == "reference"
    assert info["extension"] is False
    assert "steelyard.kernels._native" in str(info["extension_error"])
    assert info["compiler"] is None
    assert info["cpu_features"] == []


def _features() -> list[str]:
    features = kernels.info()["cpu_features"]
    assert isinstance(features, list)
    return features
