"""The figures of a module, against NumPy on what the written file decodes to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.base import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig
from families import read, small_model, token_batches

from steelyard import oneshot
from steelyard.checkpoint.figures import BINS, SAMPLE, SCALE_BINS, figures_of
from steelyard.modifiers import GPTQModifier, QuantizationModifier

GROUPS = {"num_bits": 4, "strategy": "group", "group_size": 32}
E4M3 = "torch.float8_e4m3fn"
WEIGHTS: dict[str, dict[str, Any]] = {
    "int4": GROUPS,
    "int4 asymmetric": {**GROUPS, "symmetric": False},
    "int4 clipped": {**GROUPS, "observer": "memoryless_mse"},
    "int8 channel": {"num_bits": 8, "strategy": "channel"},
    "fp8 tensor": {"num_bits": 8, "type": "float", "strategy": "tensor"},
    "fp8 block": {
        "num_bits": 8,
        "type": "float",
        "strategy": "block",
        "block_structure": [32, 16],
    },
    "nvfp4": {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": 16,
        "scale_dtype": E4M3,
        "zp_dtype": E4M3,
    },
}
STEP_AT_THE_TOP = {("int", 4): 1.0, ("int", 8): 1.0, ("float", 4): 2.0, ("float", 8): 32.0}
RANGE = {
    ("int", 4): (-8, 7),
    ("int", 8): (-128, 127),
    ("float", 4): (-6, 6),
    ("float", 8): (-448, 448),
}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "m"
    model = small_model("llama")
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():  # some weights far out, which a search clips
        if parameter.ndim == 2:
            far = torch.rand(parameter.shape, generator=generator) < 0.01
            parameter.data[far] *= 4
    model.save_pretrained(folder)
    return folder


def decoded(stored: dict[str, torch.Tensor], name: str, out: Path) -> np.ndarray:
    """The weight as compressed-tensors reads it, with products in fp32.

    Its reader of fp4 rounds them to bf16, so those are decoded here.
    """
    content = json.loads((out / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(content).config_groups["group_0"]
    local = {n.rpartition(".")[2]: t for n, t in stored.items() if n.rpartition(".")[0] == name}
    if local["weight_scale"].dtype.itemsize > 1:
        local["weight_scale"] = local["weight_scale"].float()
    if scheme.weights.type == "float" and scheme.weights.num_bits == 4:
        packed = local["weight_packed"].numpy()
        codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), -1)
        values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])[codes & 7] * np.where(codes & 8, -1, 1)
        return values * np.repeat(scales(stored, name), scheme.weights.group_size, axis=1)
    compressor = BaseCompressor.get_value_from_registry(scheme.format or content["format"])
    return compressor.decompress(local, scheme)["weight"].float().numpy()


def scales(stored: dict[str, torch.Tensor], name: str) -> np.ndarray:
    scale = stored[f"{name}.weight_scale"].double().numpy()
    if f"{name}.weight_global_scale" in stored:
        scale = scale / stored[f"{name}.weight_global_scale"].double().numpy()
    return scale


def same_histogram(counts: list[int], values: np.ndarray, low: float, high: float) -> None:
    """A value on the edge of two bins, but for rounding, may be in either."""
    assert sum(counts) == values.size
    edges = np.linspace(low, high, len(counts) + 1)[1:-1, None]
    slack = 1e-5 * (high - low)
    below = np.cumsum(counts)[:-1]
    assert (below >= (values.ravel() < edges - slack).sum(axis=1)).all()
    assert (below <= (values.ravel() < edges + slack).sum(axis=1)).all()


def check(figures: dict[str, Any], before: np.ndarray, after: np.ndarray) -> None:
    weight = figures["weight"]
    assert figures["sampled"] == before.size
    assert len(weight["before"]) == len(weight["after"]) == BINS
    assert weight["low"] <= min(before.min(), after.min())
    assert weight["high"] >= max(before.max(), after.max())
    same_histogram(weight["before"], before, weight["low"], weight["high"])
    same_histogram(weight["after"], after, weight["low"], weight["high"])


@pytest.mark.parametrize("args", WEIGHTS.values(), ids=WEIGHTS.keys())
@pytest.mark.parametrize("path", ["stream", "module"])
def test_figures_of_a_run(args: dict[str, Any], path: str, source: Path, tmp_path: Path) -> None:
    group = {"targets": ["Linear"], "weights": args}
    recipe = QuantizationModifier(config_groups={"group_0": group}, ignore=["lm_head"])
    pipeline = "auto" if path == "stream" else "basic"
    result = oneshot(source, recipe, output_dir=tmp_path / "q", pipeline=pipeline)
    weights, stored = read(source), read(tmp_path / "q")
    shares = []
    for name, module in result.modules.items():
        figures = module.details["figures"]
        before = weights[f"{name}.weight"].float().numpy()
        after = decoded(stored, name, tmp_path / "q")
        check(figures, before, after)
        error = np.square(after.astype(np.float64) - before).sum() / np.square(before).sum()
        assert module.error == pytest.approx(error, rel=1e-3)

        scale = scales(stored, name)
        told, size = figures["scale"], np.abs(scale)
        assert told["count"] == scale.size
        assert told["negative"] == (scale < 0).sum()
        assert told["min"] == pytest.approx(size.min(), rel=1e-5)
        assert told["max"] == pytest.approx(size.max(), rel=1e-5)
        assert size.min() * (1 - 1e-5) <= told["median"] <= size.max() * (1 + 1e-5)
        assert np.mean(size <= told["median"] * (1 + 1e-5)) >= 0.5
        assert len(told["counts"]) == SCALE_BINS
        same_histogram(told["counts"], np.log10(size), told["low"], told["high"])

        if "symmetric" not in args:
            kind = args.get("type", "int"), args["num_bits"]
            blocks = np.atleast_2d(scale)
            tall = before.shape[0] // blocks.shape[0]
            scaled = before / np.kron(blocks, np.ones((tall, before.shape[1] // blocks.shape[1])))
            low, high = RANGE[kind]
            half = STEP_AT_THE_TOP[kind] / 2
            # a weight at the very edge may fall on either side, by the last bit of its quotient
            least, most = (
                np.mean((scaled < low - half - slack) | (scaled > high + half + slack))
                for slack in (1e-6, -1e-6)
            )
            assert least - 1e-6 <= figures["clipped"] <= most + 1e-6
            shares.append(figures["clipped"])
    if args.get("observer") == "memoryless_mse":
        assert max(shares) > 0.001  # else the test above saw nothing
    assert json.loads(json.dumps(module.details)) == module.details


@pytest.mark.parametrize("actorder", [None, "static"])
def test_figures_of_gptq(actorder: str | None, source: Path, tmp_path: Path) -> None:
    """Before is the weight as it was, not what GPTQ made of it."""
    group = {"targets": ["Linear"], "weights": GROUPS}
    recipe = GPTQModifier(config_groups={"group_0": group}, ignore=["lm_head"], actorder=actorder)
    result = oneshot(source, recipe, token_batches(), tmp_path / "q")
    weights, stored = read(source), read(tmp_path / "q")
    for name, module in result.modules.items():
        before = weights[f"{name}.weight"].float().numpy()
        check(module.details["figures"], before, decoded(stored, name, tmp_path / "q"))
        assert "loss" in module.details


def test_groups_of_columns_that_lie_apart() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    groups = torch.arange(64, dtype=torch.int32) % 2
    scale = weight.new_tensor([[0.01, 10.0]]).expand(16, 2) * torch.arange(1, 17)[:, None]
    args = QuantizationArgs(num_bits=4, strategy="group", group_size=32)
    found = figures_of(weight, {"weight_scale": scale, "weight_g_idx": groups}, args)
    step = scale.numpy()[:, groups.numpy()]
    scaled = weight.numpy() / step
    check(found, weight.numpy(), np.clip(np.round(scaled), -8, 7) * step)
    outside = np.mean((scaled < -8.5) | (scaled > 7.5))
    assert 0.2 < found["clipped"] == pytest.approx(outside, rel=1e-5)


def test_large_weight_is_sampled_all_over() -> None:
    """Where some columns are clipped in every row, the sample finds their share."""
    rows, columns = 512, 1024
    weight = torch.full((rows, columns), 0.5)
    weight[:, 256:384] = 100.0
    args = QuantizationArgs(num_bits=4, strategy="channel")
    found = figures_of(weight, {"weight_scale": torch.ones(rows, 1)}, args)
    assert found["sampled"] == SAMPLE < weight.numel()
    assert found["clipped"] == pytest.approx(1 / 8, abs=0.02)
    assert sum(found["weight"]["before"]) == SAMPLE


def test_negative_scales_are_counted() -> None:
    args = QuantizationArgs(num_bits=4, strategy="channel")
    scale = torch.tensor([[-0.5], [0.25], [-0.125]])
    found = figures_of(torch.ones(3, 8), {"weight_scale": scale}, args)["scale"]
    assert (found["negative"], found["min"], found["max"]) == (2, 0.125, 0.5)


def test_weights_that_are_all_alike() -> None:
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    found = figures_of(torch.zeros(4, 4), {"weight_scale": torch.ones(1)}, args)
    assert sum(found["weight"]["before"]) == sum(found["weight"]["after"]) == 16
    assert sum(found["scale"]["counts"]) == 1
    assert found["clipped"] == 0
