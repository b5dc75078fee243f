"""`group_size` and `num_bits`: other groups and bits for the weights of a preset."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import preset_name_to_scheme
from compressed_tensors.quantization.quant_scheme import PRESET_SCHEMES

from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.recipes import load_recipe


@pytest.mark.parametrize("kind", [QuantizationModifier, GPTQModifier])
def test_preset_gets_the_size_and_keeps_the_rest(kind: Any) -> None:
    scheme = kind(scheme="W4A16_ASYM", group_size=64).config.config_groups["group_0"]
    plain = kind(scheme="W4A16_ASYM").config.config_groups["group_0"]
    assert (plain.weights.group_size, scheme.weights.group_size) == (128, 64)
    assert scheme.weights.model_copy(update={"group_size": 128}) == plain.weights
    preset = preset_name_to_scheme("W4A16_ASYM", ["Linear"]).weights
    assert preset is not None and preset.group_size == 128, "the preset itself was changed"


@pytest.mark.parametrize("kind", [QuantizationModifier, GPTQModifier])
@pytest.mark.parametrize("bits", [2, 3, 8])
def test_preset_with_other_bits_is_another_preset(kind: Any, bits: int) -> None:
    other = f"W{bits}A16"
    if other not in PRESET_SCHEMES:
        pytest.skip(f"this compressed-tensors has no {other}")
    changed = kind(scheme="W4A16", num_bits=bits).config.config_groups["group_0"]
    preset = kind(scheme=other, group_size=128).config.config_groups["group_0"]
    assert changed.weights == preset.weights


def test_bits_of_floats_are_fixed() -> None:
    with pytest.raises(ValueError, match="num_bits does not apply to FP8, whose weights are not"):
        QuantizationModifier(scheme="FP8", num_bits=4)
    with pytest.raises(ValueError, match="at least 2"):
        QuantizationModifier(scheme="W4A16", num_bits=1)


def test_every_preset_of_several() -> None:
    both = QuantizationModifier(
        scheme={"W4A16": ["re:.*mlp.*"], "W8A16": ["re:.*attn.*"]}, group_size=32
    )
    sizes = [s.weights.group_size for s in both.config.config_groups.values() if s.weights]
    assert sizes[0] == 32


def test_recipe_and_back() -> None:
    options = "{scheme: W4A16, group_size: 64, num_bits: 3, ignore: [lm_head]}"
    text = f"modifiers: {{QuantizationModifier: {options}}}"
    loaded = load_recipe(text)
    again = load_recipe(load_recipe(loaded.modifiers).text)
    for recipe in (loaded, again):
        config = recipe.modifiers[0].quantization_config()
        assert config is not None
        weights = config.config_groups["group_0"].weights
        assert weights is not None and (weights.group_size, weights.num_bits) == (64, 3)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"scheme": "NVFP4A16"}, "group_size does not apply to NVFP4A16"),
        ({"scheme": "FP8_DYNAMIC"}, "group_size does not apply to FP8_DYNAMIC"),
        (
            {"config_groups": {"g": {"targets": ["Linear"], "weights": {"num_bits": 8}}}},
            "weights of config_groups",
        ),
    ],
)
def test_refused_where_it_would_have_no_effect(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        QuantizationModifier(group_size=64, **options)
