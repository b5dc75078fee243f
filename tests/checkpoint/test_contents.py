"""What a checkpoint holds: weights before packing, and the values of scales."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import save_file

from steelyard.checkpoint.contents import read_contents
from steelyard.errors import CheckpointError


def save(folder: Path, tensors: dict[str, torch.Tensor], **config: object) -> Path:
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "some", **config}))
    return folder


@pytest.mark.parametrize(
    ("stored", "expected"),
    [
        (torch.tensor([127, 128, 124], dtype=torch.uint8), (3, 0.125, 1.0, 2.0, 0, 0, 0)),
        (torch.tensor([127, 255], dtype=torch.uint8), (2, 1.0, 1.0, 1.0, 1, 0, 0)),
        (torch.tensor([0.5, -2, 0, torch.inf, 3]), (5, -2.0, 0.0, 3.0, 1, 1, 1)),
        (torch.tensor([1.5, torch.nan]).to(torch.float8_e4m3fn), (2, 1.5, 1.5, 1.5, 1, 0, 0)),
        (torch.tensor([torch.nan], dtype=torch.bfloat16), (1, None, None, None, 1, 0, 0)),
        (torch.tensor([1e300, 1e-300], dtype=torch.float64), (2, 1e-300, 1e-300, 1e300, 0, 0, 0)),
        (torch.empty(0, 4), (0, None, None, None, 0, 0, 0)),
    ],
    ids=["exponents", "exponent of NaN", "signs", "fp8", "no finite", "fp64", "empty"],
)
def test_statistics_of_scales(
    stored: torch.Tensor, expected: tuple[object, ...], tmp_path: Path
) -> None:
    save(tmp_path, {"a.weight": torch.zeros(2, 2), "a.weight_scale": stored})
    (module,) = read_contents(tmp_path).modules
    found = module.scales["weight_scale"]
    assert (
        found.count,
        found.minimum,
        found.median,
        found.maximum,
        found.non_finite,
        found.zero,
        found.negative,
    ) == expected


def test_plain_checkpoint(tmp_path: Path) -> None:
    tensors = {
        "a.weight": torch.zeros(4, 8, dtype=torch.bfloat16),
        "a.bias": torch.zeros(4, dtype=torch.bfloat16),
        "b.A_log": torch.zeros(3),
        "b.D": torch.zeros(5),
        "lone": torch.zeros(()),
    }
    found = read_contents(save(tmp_path, tensors))
    assert {m.name: (m.kind, m.shape, m.weights) for m in found.modules} == {
        "a": ("bf16", (4, 8), 36),
        "b.A_log": ("fp32", (3,), 3),
        "b.D": ("fp32", (5,), 5),
        "lone": ("fp32", (), 1),
    }
    assert found.weights == 45
    assert found.nbytes == sum(t.nbytes for t in tensors.values())
    assert not any(m.is_quantized for m in found.modules)
    assert [m.name for m in read_contents(tmp_path, keep=lambda n: n == "a").modules] == ["a"]


@pytest.mark.parametrize("shape", [[-1, 4], [1 << 50, 1 << 50], [4], []])
def test_stated_shape_that_cannot_be_is_unknown(shape: list[int], tmp_path: Path) -> None:
    scheme = preset_name_to_scheme("W4A16", ["Linear"]).model_dump(mode="json")
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": scheme},
    }
    tensors = {
        "a.weight_packed": torch.zeros(4, 16, dtype=torch.int32),
        "a.weight_scale": torch.ones(4, 1),
        "a.weight_shape": torch.tensor(shape),
    }
    found = read_contents(save(tmp_path, tensors, quantization_config=config))
    (module,) = found.modules
    assert (module.kind, module.shape, module.weights) == ("int4 group 128", None, None)
    assert found.bits_per_weight is None


def test_folder_without_weights(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"holds no \*\.safetensors"):
        read_contents(tmp_path)
