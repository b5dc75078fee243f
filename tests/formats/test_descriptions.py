"""Types and schemes in words."""

from __future__ import annotations

import pytest
from compressed_tensors.quantization import QuantizationArgs, preset_name_to_scheme

from steelyard.formats.descriptions import describe_args, describe_scales, scheme_label


@pytest.mark.parametrize(
    ("scheme", "words"),
    [
        ("W4A16", "int4 group 128"),
        ("W4A16_ASYM", "int4 asymmetric group 128"),
        ("W8A8", "int8 channel"),
        ("FP8", "fp8 tensor"),
        ("FP8_BLOCK", "fp8 block 128x128"),
        ("NVFP4A16", "nvfp4"),
        ("MXFP4", "mxfp4"),
    ],
)
def test_words_for_a_scheme(scheme: str, words: str) -> None:
    weights = preset_name_to_scheme(scheme, ["Linear"]).weights
    assert weights is not None
    assert describe_args(weights) == words


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ({"num_bits": 4, "strategy": "group", "group_size": 128}, "int4, group of 128, symmetric"),
        ({"num_bits": 8, "strategy": "channel", "symmetric": False}, "int8, channel, asymmetric"),
        (
            {"type": "float", "strategy": "block", "block_structure": [128, 64]},
            "float8, block of 128 x 64, symmetric",
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "float4, tensor group of 16, symmetric",
        ),
        ({"num_bits": 8}, "int8, tensor, symmetric"),
    ],
)
def test_words_for_scales(args: dict[str, object], words: str) -> None:
    assert describe_scales(QuantizationArgs(**args)) == words


@pytest.mark.parametrize(
    ("scheme", "label"),
    [("W4A16", "W4A16"), ("W8A8", "W8A8"), ("FP8_DYNAMIC", "W8A8-FP"), ("NVFP4A16", "W4A16-FP")],
)
def test_label(scheme: str, label: str) -> None:
    assert scheme_label(preset_name_to_scheme(scheme, ["Linear"])) == label
