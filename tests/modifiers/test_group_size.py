"""`group_size`: another size for the groups of a preset."""

from __future__ import annotations

from typing import Any

import pytest
from compressed_tensors.quantization import preset_name_to_scheme

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


def test_every_preset_of_several() -> None:
    both = QuantizationModifier(
        scheme={"W4A16": ["re:.*mlp.*"], "W8A16": ["re:.*attn.*"]}, group_size=32
    )
    sizes = [s.weights.group_size for s in both.config.config_groups.values() if s.weights]
    assert sizes[0] == 32


def test_recipe_and_back() -> None:
    text = "modifiers: {QuantizationModifier: {scheme: W4A16, group_size: 64, ignore: [lm_head]}}"
    loaded = load_recipe(text)
    again = load_recipe(load_recipe(loaded.modifiers).text)
    for recipe in (loaded, again):
        config = recipe.modifiers[0].quantization_config()
        assert config is not None and config.config_groups["group_0"].weights.group_size == 64


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
