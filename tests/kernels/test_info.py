"""What `info()` says, against what the machine says."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest

from steelyard import kernels

CPUINFO = Path("/proc/cpuinfo")
X86_FEATURES = {"avx2", "fma", "avx512f", "avx512bw", "avx512vl"}


def test_info_describes_the_extension() -> None:
    from steelyard.kernels import _native

    info = kernels.info()
    assert info["backend"] == "reference"
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


def test_missing_extension_is_reported_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "steelyard.kernels._native", None)
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
