"""Outputs that need no data are the same bytes on every machine, and stay so.

No matrix product is part of them, so the number of threads does not matter to the compiled kernels,
and the instruction set only to `memoryless_mse`, whose power is not a square: AVX-512 has a way of
its own to compute it, with an error below 1e-6 as the others, which decides between scales that are
as good as equal. A digest changes only together with a line in CHANGELOG.md that says why.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from steelyard import kernels, oneshot
from steelyard.demo import model_folder

DIGESTS = {
    (
        "W4A16",
        "memoryless_minmax",
    ): "34bd0cbcfa2feb89557ae220907d4c9c3cdf37968927ef87d2cad42f98e36a3d",
    (
        "NVFP4A16",
        "memoryless_minmax",
    ): "e4b40063db32218f397d6c125559540bda8e0be1d302a78d86b6c5f1c80b6485",
    (
        "FP8_BLOCK",
        "memoryless_minmax",
    ): "145b9382e581154efc5cf5a493f3e18071382b6e8d3dde20982c3eda7b7e68d9",
    (
        "MXFP4",
        "memoryless_minmax",
    ): "77b7acf5a846fd1c67e75d7d5cbddaaeb782039352968c048745149926a76452",
}
OPTIMAL = "194e3028d660662011326e1a0cadada9915b29dd0657cf0ed868565a151eb636"
"""W4A16 with `optimal`, whose scales may be negative."""
OF_A_POWER = {
    "avx512": "44b71cefb8aa89f08bafb434eb6a20fa042893645b02826b527c690d124cea91",
    "avx2": "b2e3280b6d5fa0d257898f170007c773b7e90d72f5b1c01644c402301ba59ca6",
    "baseline": "b2e3280b6d5fa0d257898f170007c773b7e90d72f5b1c01644c402301ba59ca6",
}
"""W4A16 with `memoryless_mse`, whose norm is 2.4."""
# the others have the kernels of avx512 where there is no product
INSTRUCTION_SETS = [isa for isa in kernels.info()["instruction_sets"] if isa != "avx512_bf16"]


def digest_of_tensors(folder: Path) -> str:
    """Return the SHA-256 of names, types, shapes and bytes, whatever their order in the files."""
    lines: dict[str, str] = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                tensor = file.get_tensor(name)
                raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
                content = hashlib.sha256(raw).hexdigest()
                lines[name] = f"{name} {tensor.dtype} {tuple(tensor.shape)} {content}\n"
    return hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()


def digest(scheme: str, observer: Any, folder: Path) -> str:
    modifier: dict[str, Any] = {
        "scheme": scheme,
        "ignore": ["lm_head"],
        "weight_observer": observer,
    }
    recipe = {"QuantizationModifier": modifier}
    oneshot(str(model_folder()), recipe, output_dir=folder, show_progress=False)
    return digest_of_tensors(folder)


@pytest.mark.parametrize(("scheme", "observer"), DIGESTS)
def test_bytes_without_data_stay_as_they_are(scheme: str, observer: str, tmp_path: Path) -> None:
    assert digest(scheme, observer, tmp_path / "out") == DIGESTS[scheme, observer]


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_bytes_of_optimal_stay_as_they_are(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_ISA", isa)
    assert digest("W4A16", "optimal", tmp_path / "out") == OPTIMAL


@pytest.mark.parametrize("isa", INSTRUCTION_SETS)
def test_bytes_of_a_power_stay_as_they_are(
    isa: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEELYARD_ISA", isa)
    assert digest("W4A16", "memoryless_mse", tmp_path / "out") == OF_A_POWER[isa]
