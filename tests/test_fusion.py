"""What a server merges, held against what the stored formats have one value of."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, is_preset_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES, preset_name_to_scheme

from steelyard.formats import expected_tensors
from steelyard.fusion import fused_groups, shared_parameters, solved_together

FLOATS = [
    name
    for name in PRESET_SCHEMES
    if (weights := preset_name_to_scheme(name, ["Linear"]).weights) and weights.type == "float"
]


@pytest.mark.parametrize("preset", FLOATS)
def test_merged_layers_share_the_single_scales_of_a_float_format(preset: str) -> None:
    assert is_preset_scheme(preset)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    stored = expected_tensors(scheme, (256, 512), torch.bfloat16)
    single = {leaf for leaf, (_, shape) in stored.items() if shape == (1,)}
    assert set(shared_parameters(scheme)) == single


@pytest.mark.parametrize("strategy", ["tensor", "channel", "group"])
def test_integers_keep_a_scale_for_each_layer(strategy: str) -> None:
    size = {"group_size": 32} if strategy == "group" else {}
    weights = QuantizationArgs(num_bits=8, strategy=strategy, **size)
    scheme = QuantizationScheme(targets=["Linear"], weights=weights)
    names = ["attn.q_proj", "attn.k_proj"]
    assert shared_parameters(scheme) == []
    assert solved_together(dict.fromkeys(names, scheme)) == {name: (name,) for name in names}


def test_layers_that_share_a_scale_are_solved_together() -> None:
    scheme = preset_name_to_scheme("NVFP4A16", ["Linear"])
    names = ["attn.q_proj", "attn.k_proj", "attn.o_proj"]
    merged = ("attn.q_proj", "attn.k_proj")
    assert solved_together(dict.fromkeys(names, scheme)) == {
        "attn.q_proj": merged,
        "attn.k_proj": merged,
        "attn.o_proj": ("attn.o_proj",),
    }


def test_layers_of_linear_attention() -> None:
    """As Qwen3-Next and Qwen3.5 store them."""
    leaves = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
    names = [f"model.layers.0.linear_attn.{leaf}" for leaf in leaves]
    assert list(fused_groups(names)) == [(names[0], names[1]), (names[2], names[3])]
