"""Which observer a value gets if nobody names one, and that a named one is kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationScheme,
    preset_name_to_scheme,
)

from steelyard.cli.recipe import recipe_from
from steelyard.modifiers import GPTQModifier, QuantizationModifier
from steelyard.names import ACTIVATION_OBSERVER, WEIGHT_OBSERVER, default_observer
from steelyard.observers import Observer
from steelyard.observers.calibration import initialize_observer
from steelyard.recipes import load_recipe

STATIC = {
    "targets": ["Linear"],
    "weights": {"num_bits": 8, "strategy": "channel"},
    "input_activations": {"num_bits": 8, "strategy": "tensor"},
    "output_activations": {"num_bits": 8, "strategy": "tensor"},
}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def weights_of(modifier: Any) -> QuantizationArgs:
    (scheme,) = modifier.config.config_groups.values()
    return scheme.weights


def written(recipe: str) -> Any:
    (modifier,) = load_recipe(recipe).modifiers
    return modifier


def test_one_default_in_python_in_recipes_and_on_the_command_line() -> None:
    made = [
        QuantizationModifier(scheme="W4A16"),
        QuantizationModifier(scheme={"W4A16": ["Linear"]}),
        GPTQModifier(scheme="W4A16", actorder=None),
        recipe_from("W4A16", None),
        written("QuantizationModifier: {scheme: W4A16}"),
    ]
    assert [weights_of(each).observer for each in made] == [WEIGHT_OBSERVER] * 5
    assert len({repr(weights_of(each)) for each in made}) == 1


@pytest.mark.parametrize("modifier", [QuantizationModifier, GPTQModifier])
def test_groups_that_name_no_observer(modifier: Any) -> None:
    made = modifier(config_groups={"all": STATIC}, kv_cache_scheme=CACHE)
    scheme = made.config.config_groups["all"]
    found = [scheme.input_activations, scheme.output_activations, made.config.kv_cache_scheme]
    assert scheme.weights.observer == WEIGHT_OBSERVER
    assert [args.observer for args in found] == [ACTIVATION_OBSERVER] * 3


def test_named_observers_are_kept() -> None:
    named = {
        key: {**value, "observer": "static_minmax"} if isinstance(value, dict) else value
        for key, value in STATIC.items()
    }
    by_object = QuantizationScheme(
        targets=["Linear"],
        weights=QuantizationArgs(num_bits=4, group_size=32, observer="memoryless_minmax"),
    )
    made = QuantizationModifier(
        config_groups={"all": named}, kv_cache_scheme={**CACHE, "observer": "mse"}
    )
    scheme = made.config.config_groups["all"]
    values = (scheme.weights, scheme.input_activations, scheme.output_activations)
    assert [args.observer for args in values] == ["static_minmax"] * 3
    assert made.config.kv_cache_scheme.observer == "mse"
    kept = QuantizationModifier(config_groups={"all": by_object})
    assert weights_of(kept).observer == "memoryless_minmax"
    chosen = QuantizationModifier(scheme="W4A16", weight_observer="memoryless_minmax")
    assert weights_of(chosen).observer == "memoryless_minmax"


def test_presets_get_the_default_but_for_global_scales() -> None:
    preset = preset_name_to_scheme("NVFP4", ["Linear"])
    made = QuantizationModifier(scheme="NVFP4").config.config_groups["group_0"]
    assert preset.input_activations is not None
    assert made.input_activations.observer == preset.input_activations.observer
    assert made.weights.observer == WEIGHT_OBSERVER
    static = QuantizationModifier(scheme="FP8").config.config_groups["group_0"]
    assert static.input_activations.observer == ACTIVATION_OBSERVER
    assert static.weights.observer == WEIGHT_OBSERVER
    dynamic = QuantizationModifier(scheme="W8A8").config.config_groups["group_0"]
    assert dynamic.input_activations.observer is None


@pytest.mark.parametrize("base_name", ["weight", "input", "output"])
def test_a_scheme_applied_by_hand(base_name: str) -> None:
    module = torch.nn.Linear(4, 4)
    args = QuantizationArgs(num_bits=8, strategy="tensor")
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=args, output_activations=args
    )
    for value in (scheme.weights, scheme.input_activations, scheme.output_activations):
        value.observer = None  # which an older compressed-tensors has filled in
    module.quantization_scheme = scheme
    initialize_observer(module, base_name)
    expected = Observer.get_value_from_registry(default_observer(base_name))
    assert type(getattr(module, f"{base_name}_observer")) is expected


def test_a_global_scale_covers_all_inputs() -> None:
    """Of NVFP4's inputs only the global scale is static, and a range cut short would clip them."""
    args = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    weights = {**args, "observer": "memoryless_minmax"}
    inputs = {**args, "dynamic": "local"}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    made = QuantizationModifier(config_groups={"all": scheme}).config.config_groups["all"]
    assert made.input_activations.observer == "minmax"
